"""Which requests a case runs, step by step: a variant as logical steps, before any location or number is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dsv4_matrix.declaration.model import Variant
from dsv4_matrix.protocol import ForwardMode

#: The protocol's mode of each ``Variant.forward``.
FORWARD_MODES = {
    "extend": ForwardMode.EXTEND,
    "decode": ForwardMode.DECODE,
    "target-verify": ForwardMode.TARGET_VERIFY,
    "draft-extend": ForwardMode.DRAFT_EXTEND,
}
#: Modes whose captured graph is replayed over ``Variant.replays``.
GRAPH_MODES = frozenset({"cg-decode", "verify-cg", "de-cg", "eagle-draft-runner", "eagle-de-runner"})
DRAFT_RUNNER = "eagle-draft-runner"
#: Committed tokens of the request that is given rejected slots (reuse ``freed``): enough that its window is full
#: of them and that it holds complete C4 entries, one short of its own first C128 entry.
NEWCOMER_PREFIX = 126


@dataclass(frozen=True)
class Span:
    """One request in one step.

    Attributes:
        request: scenario-wide number; the same number in two steps is the same request, later.
        prefix: committed tokens before the step.
        rows: query rows, at positions ``prefix .. prefix + rows - 1``.
        kept: leading rows that stay committed afterwards; fewer than ``rows`` only where drafts are rejected.
    """

    request: int
    prefix: int
    rows: int
    kept: int

    @property
    def total(self) -> int:
        """Tokens of the request once the step has stored its rows."""
        return self.prefix + self.rows


@dataclass(frozen=True)
class StepPlan:
    """One forward: its mode and requests. Steps of one ``group`` run under the same tables, without rescheduling."""

    mode: ForwardMode
    spans: tuple[Span, ...]
    group: int


def forward_mode(variant: Variant) -> ForwardMode:
    """The protocol's mode of ``variant.forward``; ValueError names what is allowed."""
    try:
        return FORWARD_MODES[variant.forward]
    except KeyError:
        allowed = ", ".join(FORWARD_MODES)
        raise ValueError(f"variant {variant.name}: forward {variant.forward!r} is not one of {allowed}") from None


def plan_steps(mode: str, variant: Variant) -> tuple[StepPlan, ...]:
    """The logical steps of ``variant`` in matrix column ``mode``, in the order in which they run.

    Graph columns: the case's batch, then each of ``variant.replays`` over requests of its own; an empty replay is an
    idle step. Verify with ``accept_lens``: a decode step of the same requests follows. Draft runner: every batch is
    ``num_steps - 1`` decode steps, at ``prefix + s``.
    """
    kind = forward_mode(variant)
    batches = [variant.prefix_lens, *(variant.replays if mode in GRAPH_MODES else ())]
    rows_of = _row_counter(kind, variant)
    plans: list[StepPlan] = []
    first_request = 0
    group = 0
    for batch in batches:
        requests = range(first_request, first_request + len(batch))
        first_request += len(batch)
        if mode == DRAFT_RUNNER:
            for step in range(variant.num_steps - 1):
                spans = tuple(Span(r, prefix + step, 1, 1) for r, prefix in zip(requests, batch, strict=True))
                plans.append(StepPlan(kind, spans, group))
            group += 1
            continue
        accepts = variant.accept_lens if group == 0 else ()
        spans = tuple(
            Span(r, prefix, rows_of(i), accepts[i] if accepts else rows_of(i))
            for i, (r, prefix) in enumerate(zip(requests, batch, strict=True))
        )
        plans.append(StepPlan(kind, spans, group))
        group += 1
        if accepts:
            follow = [Span(span.request, span.prefix + span.kept, 1, 1) for span in spans]
            if variant.reuse == "freed":
                follow.append(Span(first_request, NEWCOMER_PREFIX, 1, 1))
                first_request += 1
            plans.append(StepPlan(ForwardMode.DECODE, tuple(follow), group))
            group += 1
    return tuple(plans)


def _row_counter(kind: ForwardMode, variant: Variant) -> Callable[[int], int]:
    """Rows of the i-th request of a batch. A replay with more requests than the case repeats its extend lengths."""
    if kind is ForwardMode.DECODE:
        return lambda _: 1
    if not variant.extend_lens:
        raise ValueError(f"variant {variant.name}: forward {variant.forward!r} needs extend_lens")
    lens = variant.extend_lens
    return lambda i: lens[i % len(lens)]
