"""The matrix as markdown for README.md: the table in short cells, and below it every variant and every reason."""

from __future__ import annotations

from collections import Counter

from tabulate import tabulate

from dsv4_matrix.declaration.model import Cell, Level, Matrix, Probe, State
from dsv4_matrix.declaration.wording import variant_text


def matrix_markdown(matrix: Matrix) -> str:
    """Ratios down, modes across, and the details folded away below: one fold a covered cell, one for all reasons.

    Depends on the declaration alone, so that two people always write the same bytes.
    """
    parts = [_table(matrix), _legend(matrix), *(_variants(matrix, cell) for cell in matrix.cells if cell.variants)]
    return "\n\n".join([*parts, _reasons(matrix), _refusals(matrix)])


def cell_markdown(cell: Cell) -> str:
    """``✓ 7 variants, L3``, ``—`` or ``production-unreachable: why``."""
    if cell.state is State.COVERED:
        promise = f", {cell.promise.value}" if cell.promise is not Level.SAME_PLAN else ""
        return f"✓ {_count(len(cell.variants), 'variant')}{promise}"
    if cell.state is State.NOT_APPLICABLE:
        return "—"
    return f"{cell.state.value}: {_escape(cell.reason)}"


def _table(matrix: Matrix) -> str:
    heads = ["ratio", *(_escape(mode.title) for mode in matrix.modes)]
    rows = [
        [str(ratio), *(cell_markdown(matrix.cell(f"r{ratio}/{mode.name}")) for mode in matrix.modes)]
        for ratio in matrix.ratios
    ]
    return tabulate(rows, headers=heads, tablefmt="github", disable_numparse=True)


def _legend(matrix: Matrix) -> str:
    states = Counter(cell.state for cell in matrix.cells)
    variants = sum(len(cell.variants) for cell in matrix.cells)
    others = len(matrix.cells) - states[State.COVERED]
    return (
        f"{_count(states[State.COVERED], 'covered cell')} with {_count(variants, 'variant')}. "
        f"`—` is structurally impossible for this method. Each of the other {others} cells has a reason and a probe: "
        f"a test that the backend refuses at the call site. "
        f"L0 to L4 is how far a row's bits are promised (docs/guarantees.md). "
        f"CG is CUDA graph, PCG and BCG piecewise and breakable CUDA graph, DE draft extend."
    )


def _variants(matrix: Matrix, cell: Cell) -> str:
    title = next(mode.title for mode in matrix.modes if mode.name == cell.mode)
    lines = [f"- `{variant.name}`: {variant_text(variant)}" for variant in cell.variants]
    return _fold(f"ratio {cell.ratio}, {title}: {_count(len(cell.variants), 'variant')}", lines)


def _reasons(matrix: Matrix) -> str:
    cells = [cell for cell in matrix.cells if cell.probe is not None]
    lines = [
        f"- `{cell.id}`, {cell.state.value}: {_escape(cell.reason)} {_raises(cell.probe)}"
        for cell in cells
        if cell.probe
    ]
    return _fold(f"why the other {_count(len(cells), 'cell')} are not covered", lines)


def _refusals(matrix: Matrix) -> str:
    lines = [f"- `{refusal.name}`: {_escape(refusal.reason)} {_raises(refusal.probe)}" for refusal in matrix.refusals]
    return _fold(f"{_count(len(lines), 'refusal')} outside the cells, each with a probe", lines)


def _raises(probe: Probe) -> str:
    return f"Raises `{probe.raises}` at `{probe.site}`."


def _fold(summary: str, lines: list[str]) -> str:
    # GitHub reads markdown inside <details> only after an empty line.
    return "\n".join(["<details>", f"<summary>{summary}</summary>", "", *lines, "", "</details>"])


def _escape(text: str) -> str:
    """Text of the declaration, safe in a table cell and outside code."""
    for character in "\\`*_|<>[]":
        text = text.replace(character, f"\\{character}")
    return text


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
