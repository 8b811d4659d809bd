"""One request, the needle, in batches of many kinds: what it says is the same in each, all around it differs.

A pure function over scenarios; ``turns`` says which batches there are. Fillers, pages, slots and request rows are drawn
from the seed of the fillers; the needle's keys, entries, selection and queries are laid over them from a scenario in
which it is alone. So the same logical rows are answered in other places of the batch, beside other rows, from other
physical pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4_matrix.cases.batch import DRAFT_RUNNER
from dsv4_matrix.cases.build import assemble
from dsv4_matrix.cases.queries import FINE
from dsv4_matrix.cases.scenario import Placement, Scenario, Step
from dsv4_matrix.cases.turns import ALONE, has_needle, needle_of, step_plans, turns_of
from dsv4_matrix.declaration.model import Case, Matrix, Variant


@dataclass(frozen=True)
class Composition:
    """A scenario whose steps are batches of the given kinds, and where the needle stands in each.

    Attributes:
        scenario: all kinds in turn; for a draft runner each kind is a chain of steps.
        alone: the needle's own scenario, one step or one chain: what it must answer wherever it stands.
        kinds: name of each step's batch.
        own_step: step of ``alone`` that each step repeats.
        part: which of that step's rows it repeats: all of them, but in a chunk.
        rows: places of the needle's rows in each step, one slice for each time it is there.
    """

    scenario: Scenario
    alone: Scenario
    kinds: tuple[str, ...]
    own_step: tuple[int, ...]
    part: tuple[slice, ...]
    rows: tuple[tuple[slice, ...], ...]


def compose(case: Case, matrix: Matrix, device: str, kinds: Sequence[str], fillers: int) -> Composition:
    """The needle of ``case`` in batches of ``kinds``, with fillers drawn from ``fillers`` and the case's id.

    ValueError for a case without a request, for a kind that is neither in ``KINDS`` nor a chunk of so many rows, and
    for chunks of anything but a prefill.
    """
    if case.cell is None or case.variant is None or not has_needle(case):
        raise ValueError(f"{case.id}: has no request that could be a needle")
    prefix, rows = needle_of(case.variant)
    steps = case.variant.num_steps - 1 if case.cell.mode == DRAFT_RUNNER else 1
    groups = [turns_of(case, kind, rows, steps) for kind in kinds]
    turns = [turn for group in groups for turn in group]
    alone = assemble(case, step_plans(case.variant, [turns_of(case, ALONE, rows, steps)], prefix), matrix, device, FINE)
    around = replace(case, id=f"{case.id}#fillers-{fillers}")  # another seed; no declared id has this character
    scenario = assemble(around, step_plans(case.variant, groups, prefix), matrix, device)
    laid: list[tuple[Step, Placement]] = []
    for turn, step, placement in zip(turns, scenario.steps, scenario.placements, strict=True):
        for at in turn.places:
            own = alone.steps[turn.own], alone.placements[turn.own]
            step, placement = _overlaid(step, placement, at, *own, turn.part)
        for at in (at for at, name in enumerate(turn.names) if name == "nan"):
            step, placement = _poisoned(step, placement, at)
        laid.append((replace(step, sink=alone.steps[0].sink), placement))
    return Composition(
        scenario=replace(
            scenario, steps=tuple(step for step, _ in laid), placements=tuple(placement for _, placement in laid)
        ),
        alone=alone,
        kinds=tuple(turn.kind for turn in turns),
        own_step=tuple(turn.own for turn in turns),
        part=tuple(turn.part for turn in turns),
        rows=tuple(tuple(slice(at * t.count, (at + 1) * t.count) for at in t.places) for t in turns),
    )


def variant_for(composition: Composition, variant: Variant) -> Variant:
    """``variant`` for driving a composition in a graph: a bucket that leaves pad rows behind the largest batch."""
    largest = max(placement.batch.batch_size for placement in composition.scenario.placements)
    return replace(variant, bucket=largest + 2)


def _overlaid(
    step: Step, placement: Placement, at: int, own: Step, own_placement: Placement, part: slice
) -> tuple[Step, Placement]:
    """Request ``at`` says what rows ``part`` of ``own``'s only request say."""
    rows, tokens, entries_at = _rows_of(step, at), _part(step.token_base, at), _part(step.entry_base, at)
    step = replace(
        step,
        tokens=_put(step.tokens, tokens, own.tokens[: tokens.stop - tokens.start]),
        entries=_put(step.entries, entries_at, own.entries[: entries_at.stop - entries_at.start]),
        selection=_put_some(step.selection, rows, None if own.selection is None else own.selection[part]),
        q=_put(step.q, rows, own.q[part]),
        k=_put(step.k, rows, own.k[part]),
        compressed=_put_some(step.compressed, rows, None if own.compressed is None else own.compressed[part]),
    )
    if part.start:
        return step, placement  # its history is what earlier chunks stored
    history, entries = _stored_of(placement, at)
    return step, replace(
        placement,
        history_k=_put(placement.history_k, history, own_placement.history_k),
        entry_k=_put_some(placement.entry_k, entries, own_placement.entry_k),
    )


def _poisoned(step: Step, placement: Placement, at: int) -> tuple[Step, Placement]:
    """Request ``at`` holds NaN in its query, its keys and all that is stored of it."""
    rows, nan = _rows_of(step, at), torch.tensor(float("nan"))
    history, entries = _stored_of(placement, at)
    step = replace(
        step,
        q=_put(step.q, rows, nan),
        k=_put(step.k, rows, nan),
        compressed=_put_some(step.compressed, rows, nan),
    )
    return step, replace(
        placement,
        history_k=_put(placement.history_k, history, nan),
        entry_k=_put_some(placement.entry_k, entries, nan),
    )


def _put(values: Tensor, where: slice | Tensor, new: Tensor) -> Tensor:
    """A copy of ``values`` with ``new`` at ``where``."""
    values = _copy(values)
    values[where] = new.to(values.device, values.dtype)
    return values


def _put_some(values: Tensor | None, where: slice | Tensor | None, new: Tensor | None) -> Tensor | None:
    """The same where there is such a tensor at all."""
    return values if values is None or where is None or new is None else _put(values, where, new)


def _copy(values: Tensor) -> Tensor:
    """A copy with the same strides: a strided query stays a slice of a wider tensor."""
    if values.is_contiguous():
        return values.clone()
    wide = values.new_full((*values.shape[:2], values.stride(1)), float("nan"))
    wide[..., : values.shape[2]] = values
    return wide[..., : values.shape[2]]


def _rows_of(step: Step, at: int) -> slice:
    first = sum(step.row_counts[:at])
    return slice(first, first + step.row_counts[at])


def _part(base: Tensor, at: int) -> slice:
    return slice(int(base[at]), int(base[at + 1]))


def _stored_of(placement: Placement, at: int) -> tuple[Tensor, Tensor | None]:
    """Which rows of the placement's history and entries are of request ``at``."""
    locations = placement.req_to_token[int(placement.batch.req_pool_indices[at])]
    history = torch.isin(placement.history_loc, locations)
    return history, None if placement.entry_loc is None else torch.isin(placement.entry_loc, locations)
