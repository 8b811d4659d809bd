"""What a worker leaves for the controlling process, in files of a folder that both of them know.

What it collected and on which machine, why it cannot run at all, and its stack if it sees its end coming: xdist carries
none of these. A worker on another machine has no such folder, and leaves nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

#: Environment variable that names the folder to a worker.
NOTES = "DSV4_MATRIX_NOTES"


def note_path(notes: Path, worker: str) -> Path:
    """Where the worker with that xdist id (``gw3``; no two of a run share one) leaves its note."""
    return notes / f"{worker}.txt"


@dataclass(frozen=True)
class Found:
    """What a worker found when it had collected.

    Attributes:
        cases: the case that each collected test runs, by node id. A node id alone does not tell: a test of something
            else may have a case id among its parameters.
        machine: fields of the ``Machine`` that it runs them on; empty if it runs none.
        kernels: fields of each ``ServedCall`` of its backend there.
    """

    cases: Mapping[str, str]
    machine: Mapping[str, str] = field(default_factory=dict)
    kernels: Sequence[Mapping[str, str]] = ()


def write_found(notes: Path, worker: str, found: Found) -> None:
    """Leave ``found`` for the controller."""
    (notes / f"{worker}.json").write_text(json.dumps(asdict(found)), encoding="ascii")


def read_found(node: Any) -> Found | None:
    """What ``write_found`` left of ``node``, an xdist WorkerController; None if it runs on another machine."""
    notes = _notes_of(node)
    return None if notes is None else Found(**json.loads((notes / f"{node.gateway.id}.json").read_text("ascii")))


def write_refusal(notes: Path, worker: str, reason: str) -> None:
    """Leave why this worker cannot run anything: what the user has to mend."""
    (notes / f"{worker}.refusal").write_text(reason, encoding="utf-8")


def read_refusal(node: Any) -> str:
    """What ``write_refusal`` left of ``node``, an xdist WorkerController; empty if it left nothing."""
    notes = _notes_of(node)
    path = None if notes is None else notes / f"{node.gateway.id}.refusal"
    return path.read_text("utf-8") if path is not None and path.exists() else ""


def _notes_of(node: Any) -> Path | None:
    notes = node.gateway.spec.env.get(NOTES)
    return None if notes is None else Path(notes)
