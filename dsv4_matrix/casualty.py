"""Why a worker died, and what that makes of the case that it was running."""

from __future__ import annotations

import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4_matrix.report.result import Outcome
from dsv4_matrix.shard.notes import note_path

#: First line of a note left by the deadline, written by Python's watchdog.
_DEADLINE = re.compile(r"Timeout \(\d+:\d\d:\d\d(\.\d+)?\)!")
_PATIENCE = 10.0
#: The frame under which everything belongs to the case, and how many frames of it fit on a screen.
_EXECUTE = "dsv4_matrix/plugin.py"
_FRAMES = 30


@dataclass(frozen=True)
class Casualty:
    """What is recorded of a case whose worker died: ``timeout`` or ``lost``, one sentence, and the stack if known."""

    outcome: Outcome
    reason: str
    stack: str


def casualty(node: Any, notes: Path, timeout: float) -> Casualty:
    """Of the case that ``node``, an xdist WorkerController, was running when it died.

    Args:
        notes: folder with the notes of workers, see ``shard.notes.note_path``.
        timeout: seconds that a case may take.
    """
    path = note_path(notes, node.gateway.id)
    note = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    stack = _of_case(note)
    if _DEADLINE.match(note):
        return Casualty(Outcome.TIMEOUT, f"no result within {timeout:g} s; its worker was ended and replaced", stack)
    return Casualty(Outcome.LOST, f"its worker {_ending(node)} while the case ran", stack)


def _of_case(note: str) -> str:
    """The first line of a note, and of the thread that ran the case the frames inside pytest: one screen."""
    head, *lines = note.strip().splitlines() or [""]
    threads: list[list[str]] = [[]]
    for line in lines:
        if line.startswith(("Thread ", "Current thread ")):
            threads.append([])
        threads[-1].append(line)
    mine = next((thread for thread in threads if any(_EXECUTE in line for line in thread)), threads[-1])
    end = next((number for number, line in enumerate(mine) if _EXECUTE in line), len(mine))
    return "\n".join([head, *mine[:end][:_FRAMES]])


def _ending(node: Any) -> str:
    """How the process ended, in words; execnet holds it for workers of this machine."""
    process = getattr(getattr(node.gateway, "_io", None), "popen", None)
    if process is None:
        return "died"
    try:
        status: int = process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        return "stopped answering"
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
