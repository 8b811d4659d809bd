"""What the canonical report leaves out on purpose: durations, workers, the host and tracebacks, for people."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dsv4_matrix.report.canonical import ReportError, encode, write_in_one_step

SUFFIX = ".telemetry.jsonl"


@dataclass(frozen=True)
class Telemetry:
    """Of one case, over all its draws.

    Attributes:
        id: case id.
        seconds: of its call phase.
        worker: ``main`` without xdist.
        host: name of the machine.
        message: one screen, empty for a pass.
        started: seconds from the start of the run, in the process that collects results, to that of the call phase.
        spent: seconds of the host to ``build`` the inputs, to ``drive`` the backend and to ``judge`` the answers.
    """

    id: str
    seconds: float
    worker: str
    host: str
    message: str = ""
    started: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)


def telemetry_path(report: Path) -> Path:
    """``run.telemetry.jsonl`` beside ``run.jsonl``: two reports in one folder keep one each."""
    return report.with_name(report.stem + SUFFIX)


def read(path: Path) -> tuple[Telemetry, ...]:
    """What ``write`` wrote to ``path``. ReportError, with ``path:line``, if it cannot be read."""
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path}: cannot read the telemetry: {error}") from None
    entries = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            entries.append(Telemetry(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ReportError(f"{path}:{number}: not telemetry of a case: {error}") from None
    return tuple(entries)


def write(entries: Iterable[Telemetry], path: Path) -> None:
    """JSON Lines, sorted by case id. ReportError if ``path`` cannot be written."""
    lines = [encode(asdict(entry)) + "\n" for entry in sorted(entries, key=lambda entry: entry.id)]
    write_in_one_step("".join(lines).encode("ascii"), path)
