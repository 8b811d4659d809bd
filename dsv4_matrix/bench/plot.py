"""Time of each shape against its two floors and the peer, as SVG written by hand: no library is needed to draw it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from dsv4_matrix.bench.results import Measurement

ROW, TOP, BOTTOM, LEFT, RIGHT, WIDTH = 15, 52, 34, 176, 16, 900
MEMORY, MATRIX, PEER, OURS, GRID, BAR = "#1f77b4", "#ff7f0e", "#d62728", "#2ca02c", "#d0d0d0", "#b8c4b8"
#: within a decade
TICKS = (1, 2, 5)


class Axis:
    """Microseconds, logarithmic, over the room right of the names."""

    def __init__(self, values: Sequence[float]) -> None:
        self.low, self.high = math.log10(min(values)) - 0.05, math.log10(max(values)) + 0.05

    def at(self, value: float) -> float:
        return LEFT + (math.log10(value) - self.low) / (self.high - self.low) * (WIDTH - LEFT - RIGHT)

    def ticks(self) -> Iterator[float]:
        for decade in range(math.floor(self.low), math.ceil(self.high) + 1):
            for step in TICKS:
                if self.low <= math.log10(step) + decade <= self.high:
                    yield step * 10.0**decade


def svg(results: Sequence[Measurement], title: str) -> str:
    """One row a shape, in the given order. ValueError for no shapes: there is nothing to draw."""
    if not results:
        raise ValueError("a plot needs at least one measured shape")
    axis = Axis(
        [time for one in results for time in (one.median, one.memory_floor, one.matrix_floor, one.peer) if time]
    )
    height = TOP + ROW * len(results) + BOTTOM
    return "\n".join(_lines(results, title, axis, height)) + "\n"


def _lines(results: Sequence[Measurement], title: str, axis: Axis, height: int) -> Iterator[str]:
    end = height - BOTTOM
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="10">'
    )
    yield f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    yield f'<text x="{WIDTH / 2:g}" y="16" font-size="13" text-anchor="middle">{escape(title)}</text>'
    yield from _legend()
    for tick in axis.ticks():
        x = axis.at(tick)
        yield f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{end}" stroke="{GRID}" stroke-width="0.5"/>'
        yield f'<text x="{x:.1f}" y="{end + 13}" text-anchor="middle">{tick:g}</text>'
    yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2:g}" y="{height - 6}" text-anchor="middle">microseconds</text>'
    for number, one in enumerate(results):
        y = TOP + ROW * number + ROW / 2
        yield f'<text x="{LEFT - 8}" y="{y + 3:g}" text-anchor="end">{escape(one.shape.name)}</text>'
        yield (
            f'<line x1="{axis.at(one.floor):.1f}" y1="{y:g}" x2="{axis.at(one.median):.1f}" y2="{y:g}" '
            f'stroke="{BAR}" stroke-width="2"/>'
        )
        yield _bar(axis.at(one.memory_floor), y, MEMORY)
        yield _bar(axis.at(one.matrix_floor), y, MATRIX)
        if one.peer:
            yield _cross(axis.at(one.peer), y)
        yield _dot(axis.at(one.median), y)
    yield "</svg>"


def _legend() -> Iterator[str]:
    y = 32
    for x, mark, name in (
        (LEFT, _bar(LEFT, y, MEMORY), "memory floor"),
        (LEFT + 110, _bar(LEFT + 110, y, MATRIX), "matrix floor"),
        (LEFT + 220, _cross(LEFT + 220, y), "peer"),
        (LEFT + 290, _dot(LEFT + 290, y), "this kernel"),
    ):
        yield mark
        yield f'<text x="{x + 9}" y="{y + 3}">{name}</text>'


def _bar(x: float, y: float, colour: str) -> str:
    return f'<line x1="{x:.1f}" y1="{y - 5:g}" x2="{x:.1f}" y2="{y + 5:g}" stroke="{colour}" stroke-width="2"/>'


def _cross(x: float, y: float) -> str:
    path = f"M{x - 4:.1f} {y - 4:g}l8 8m0 -8l-8 8"
    return f'<path d="{path}" stroke="{PEER}" stroke-width="1.5" fill="none"/>'


def _dot(x: float, y: float) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:g}" r="3.5" fill="{OURS}"/>'
