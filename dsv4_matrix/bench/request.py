"""What the command is asked, and which options go together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dsv4_matrix.report.canonical import ReportError, check_writable


@dataclass(frozen=True)
class Request:
    """What the command is asked, by its options' names.

    Attributes:
        kernel, backend: what to time, and whose steps; None is the only one installed.
        shapes: patterns on the names of the 41 shapes. None measures all of them, or none with ``long`` or ``steps``.
        long, steps: long contexts; what surrounds attention.
        json, plot: files to write.
        source: a document to render instead of measuring.
        table: print that document as Markdown.
    """

    kernel: str | None = None
    backend: str | None = None
    shapes: str | None = None
    long: bool = False
    steps: bool = False
    json: Path | None = None
    plot: Path | None = None
    source: Path | None = None
    table: bool = False


class RequestError(ValueError):
    """Options that do not go together, or that cannot be followed here."""


def check(request: Request) -> None:
    """Everything that can be refused before a minute of measuring."""
    measuring = {
        "--kernel": request.kernel, "--backend": request.backend, "--shapes": request.shapes, "--long": request.long,
        "--steps": request.steps, "--json": request.json,
    }  # fmt: skip
    if request.source is not None:
        given = [name for name, value in measuring.items() if value]
        if given:
            raise RequestError(f"--from reads what was measured; {', '.join(given)} would measure")
    elif request.table:
        raise RequestError("--table renders a document: measure with --json PATH, then --from PATH --table")
    if request.plot is not None and request.plot.suffix != ".svg":
        raise RequestError(f"--plot writes SVG: expected a name that ends in .svg, got {request.plot}")
    steps_alone = request.source is None and request.steps and not request.long and not request.shapes
    if request.plot is not None and steps_alone:
        raise RequestError("--plot draws shapes, and --steps alone measures none; add --shapes or --long")
    for name, path in (("--json", request.json), ("--plot", request.plot)):
        try:
            if path is not None:
                check_writable(path)
        except ReportError as error:
            raise RequestError(f"{name}: {error}") from None
