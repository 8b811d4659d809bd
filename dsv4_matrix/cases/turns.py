"""Which batches a composition is of: the rows of requests that stand around the needle, step by step, by name.

Names and lengths only; ``compose`` lays the needle's tensors over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsv4_matrix.cases.batch import Span, StepPlan, forward_mode
from dsv4_matrix.declaration.model import Case, Variant
from dsv4_matrix.protocol import ForwardMode

#: Tokens by which a shorter needle's prefix grows: a whole page keeps its place in a page, a group and a window. Then
#: its window is full, and there are entries enough for keys to be split.
_PAGE = 256
#: Committed tokens of neighbours, beside the needle's own length.
_LONG, _SHORT = 1900, 2
_SOME, _OTHERS = 70, 131

ALONE = "alone"
#: Kinds of batches, each a row of requests: ``N`` is the needle, the others are fillers by name.
KINDS: dict[str, str] = {
    ALONE: "N",
    "first": "N a b",
    "middle": "a N b",
    "last": "a b N",
    "dup": "N a N",
    "permuted": "b N a",
    "long-neighbour": "long N",
    "short-neighbour": "N short",
    "empty-neighbour": "empty N empty",
    "nan-neighbour": "nan N nan",
}
_PREFIXES = {"a": _SOME, "b": _OTHERS, "long": _LONG, "short": _SHORT, "empty": 0, "nan": _SOME}
#: ``chunk-5``: the needle's rows in turns of five, alone, each turn over what the backend stored of those before it.
CHUNK = "chunk-"
#: A chunked prefill here takes this many turns of equal size, and one of fewer rows where they do not divide evenly.
_TURNS = 3


@dataclass(frozen=True)
class Turn:
    """One step of a kind: the batch's requests by name, the needle's step and rows that it repeats."""

    kind: str
    names: tuple[str, ...]
    own: int
    part: slice

    @property
    def count(self) -> int:
        return int(self.part.stop - self.part.start)

    @property
    def places(self) -> tuple[int, ...]:
        return tuple(at for at, name in enumerate(self.names) if name == "N")


def has_needle(case: Case) -> bool:
    """Whether ``case`` has a request at all; an idle case has none."""
    return case.variant is not None and bool(case.variant.prefix_lens)


def kinds_around(variant: Variant) -> tuple[str, ...]:
    """Every kind that a needle of ``variant`` can stand in but ``alone``: a prefill of several rows also in chunks."""
    kinds = tuple(kind for kind in KINDS if kind != ALONE)
    rows = needle_of(variant)[1]
    if forward_mode(variant) is not ForwardMode.EXTEND or rows < 2:
        return kinds
    return (*kinds, f"{CHUNK}{max(1, rows // _TURNS)}")


def needle_of(variant: Variant) -> tuple[int, int]:
    """``(prefix, rows)`` of the longest request, grown to at least a page."""
    lengths = variant.extend_lens or (1,) * len(variant.prefix_lens)
    prefix, rows = max(zip(variant.prefix_lens, lengths, strict=True))
    return (prefix if prefix >= _PAGE else prefix + _PAGE), rows


def turns_of(case: Case, kind: str, rows: int, steps: int) -> list[Turn]:
    """Steps of one kind; ``rows`` and ``steps`` are the needle's.

    ValueError for a kind that is neither in ``KINDS`` nor a chunk of so many rows, and for chunks but of a prefill.
    """
    if kind in KINDS:
        return [Turn(kind, tuple(KINDS[kind].split()), step, slice(0, rows)) for step in range(steps)]
    size = kind.removeprefix(CHUNK)
    if not kind.startswith(CHUNK) or not size.isdecimal() or int(size) < 1:
        raise ValueError(f"{case.id}: no composition is called {kind}; there are {', '.join(KINDS)}, {CHUNK}5")
    assert case.variant is not None
    if forward_mode(case.variant) is not ForwardMode.EXTEND:
        raise ValueError(f"{case.id}: {kind} is of a prefill, this is {case.variant.forward}")
    cuts = range(0, rows, int(size))
    return [Turn(kind, ("N",), 0, slice(first, min(first + int(size), rows))) for first in cuts]


def step_plans(variant: Variant, groups: Sequence[Sequence[Turn]], prefix: int) -> tuple[StepPlan, ...]:
    """Steps of these turns, each kind under tables of its own, all requests distinct. ``prefix`` is the needle's."""
    mode = forward_mode(variant)
    plans, first = [], 0
    for group, turns in enumerate(groups):
        for turn in turns:
            lengths = [(prefix if name == "N" else _PREFIXES[name]) + turn.own + turn.part.start for name in turn.names]
            spans = tuple(Span(first + at, length, turn.count, turn.count) for at, length in enumerate(lengths))
            plans.append(StepPlan(mode, spans, group))
        first += len(turns[0].names)
    return tuple(plans)
