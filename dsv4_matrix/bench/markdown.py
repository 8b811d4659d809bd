"""A document of results as Markdown for docs/performance.md: tables, and below them what the run says of itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from dsv4_matrix.bench.present import choices, comparison, machine_line, missing, rates
from dsv4_matrix.bench.results import LONG_CONTEXT, PEER_TABLE, Measurement, Results, ladders
from dsv4_matrix.bench.text import cell


def markdown(results: Results) -> str:
    """Only the parts that were measured; every figure is the document's."""
    parts = [machine_line(results.machine) + ".", rates(results.ceilings) + "."]
    parts += [f"**{text}.**" for text in missing(results)]
    for name, group in results.groups.items():
        parts.append("\n".join(_shapes(group)))
        if name == PEER_TABLE and results.summary is not None:
            parts.append(comparison(results) + ".")
        if name == LONG_CONTEXT:
            parts.append("\n".join(_ladders(group)))
    if results.steps:
        rows = [(step.name, f"{step.value:.1f} {step.unit}".strip(), step.goal) for step in results.steps]
        parts.append("\n".join(_table(("of a decode step", "measured", "goal"), rows, right=(1,))))
    parts += [choice + "." for choice in choices(results)]
    if results.kernels:
        parts.append("\n".join(_kernels(results)))
    return "\n\n".join(parts) + "\n"


def _shapes(group: Sequence[Measurement]) -> Iterator[str]:
    header = ("shape", "µs", "10 to 90 %", "memory floor", "matrix floor", "x floor", "peer", "ratio", "kernel")
    rows = [
        (
            one.shape.name,
            f"{one.median:.1f}",
            f"{one.low:.1f} to {one.high:.1f}",
            f"{one.memory_floor:.1f}",
            f"{one.matrix_floor:.1f}",
            f"{one.median / one.floor:.1f}",
            "" if one.peer is None else f"{one.peer:.1f}",
            "" if one.ratio is None else f"{one.ratio:.2f}",
            one.kernel,
        )
        for one in group
    ]
    return _table(header, rows, right=range(1, 8))


def _ladders(group: Sequence[Measurement]) -> Iterator[str]:
    rows = [
        (
            ladder.name,
            ", ".join(f"{rung.shape.keys}: {rung.picoseconds_a_key:.0f}" for rung in ladder.rungs),
            f"{ladder.growth:.2f}",
        )
        for ladder in ladders(group)
    ]
    return _table(("shape", "keys a row: ps a key and row", "longest over shortest"), rows, right=(2,))


def _kernels(results: Results) -> Iterator[str]:
    rows = [
        (
            f"`{one.name}`" + (f" {one.variant}" if one.variant else ""),
            str(one.warps),
            str(one.registers),
            str(one.local_bytes),
            str(one.shared_bytes),
        )
        for one in results.kernels
    ]
    header = ("compiled kernel", "warps", "registers a thread", "spilled bytes a thread", "shared bytes")
    return _table(header, rows, right=range(1, 5))


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int]) -> Iterator[str]:
    numbers = set(right)
    yield "| " + " | ".join(header) + " |"
    yield "|" + "|".join("---:" if column in numbers else "---" for column in range(len(header))) + "|"
    for row in rows:
        yield "| " + " | ".join(cell(text) for text in row) + " |"
