"""One case as the gate runs it: its needle in the batches of a plan, judged for accuracy, its bits kept by row.

Equal bits alone prove nothing: the answers must also be right, and the inputs such that other sums would show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from dsv4_matrix.admission import ConcurrencyError, KernelPath, serialise
from dsv4_matrix.declaration.model import Case, Variant
from dsv4_matrix.execution import Execution, Setup, fault, raised
from dsv4_matrix.import_fault import ENDINGS
from dsv4_matrix.overrides import Forced
from dsv4_matrix.report.bits import CaseBits
from dsv4_matrix.report.result import Outcome, Result, format_margin

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4_matrix.cases.compose import Composition
    from dsv4_matrix.gate.plan import RunPlan
    from dsv4_matrix.gate.rows import RowStore
    from dsv4_matrix.modes.accumulated import RowSums
    from dsv4_matrix.modes.composed import Answer


@dataclass(frozen=True)
class Composed:
    """A case's result under a plan and what a person reads; its bits, None unless it passed; what a rule replaced."""

    result: Result
    message: str
    bits: CaseBits | None
    forced: tuple[Forced, ...] = ()


def execute_composed(
    case: Case, setup: Setup, plan: RunPlan, keep: RowStore | None = None, paths: Sequence[KernelPath] = ()
) -> Composed:
    """Run the needle of ``case`` in the batches of ``plan``. Whatever the backend raises is an outcome, SystemExit too.

    ``paths`` are the kernel paths that serve it: a batch of several requests for one that takes one at a time is an
    error of the run, whoever put it together.

    The case passes if its mode was driven without a violation, every batch of one path gave the needle the same bits,
    these are within the budgets of the declaration, and another split of the keys would have changed them.
    """
    from dsv4_matrix.modes.errors import BackendError

    # An ordinary run of the case may well pass: what runs it again is the gate.
    setup = replace(setup, repeat=setup.repeat.of("gate"))
    try:
        return _execute(case, setup, plan, keep, paths)
    except (BackendError, ConcurrencyError) as error:
        return _short(fault(case, setup, Outcome.ERROR, str(error)))
    except ENDINGS as error:
        return _short(raised(case, setup, error))


def kinds_of(plan: RunPlan, variant: Variant) -> tuple[str, ...]:
    """Batches of a plan: ``alone``, ``among`` for all others, or names of compositions with commas between."""
    from dsv4_matrix.cases.turns import kinds_around
    from dsv4_matrix.modes.composed import PADDED

    if plan.composition == "among":
        return (*kinds_around(variant), PADDED)
    return tuple(plan.composition.split(","))


def _execute(case: Case, setup: Setup, plan: RunPlan, keep: RowStore | None, paths: Sequence[KernelPath]) -> Composed:
    from dsv4_matrix.cases.compose import compose, variant_for
    from dsv4_matrix.judge import judge
    from dsv4_matrix.judge.case_bits import case_bits
    from dsv4_matrix.judge.split_sight import LEAST, split_sight
    from dsv4_matrix.modes.accumulated import drive_accumulators
    from dsv4_matrix.modes.composed import PADDED, drive_composition

    assert case.cell is not None
    assert case.variant is not None
    device = setup.machine.torch_device
    kinds = kinds_of(plan, case.variant)
    batches = [kind for kind in kinds if kind != PADDED]
    composition = compose(case, setup.matrix, device, batches, plan.fillers)
    for path in paths:
        for placement in composition.scenario.placements:
            path.check_requests(placement.batch.batch_size)
    variant, forced = _one_request(case, variant_for(composition, case.variant), paths)
    trace, answers = drive_composition(
        case, composition, setup.backend.factory, device, padded=PADDED in kinds, variant=variant
    )
    sums, violations = drive_accumulators(composition, setup.backend.factory)
    told = [*trace.violations, *violations, *_disagreements(answers, composition), *_unlike_sums(sums, composition)]
    if told:
        return _short(fault(case, setup, Outcome.FAILED, "\n".join(told)))
    first = {(a.observation.leg, a.observation.step): a.observation for a in reversed(answers)}
    observations = [first[key] for key in sorted(first)]
    alone = replace(composition.alone, case_id=case.id)
    verdict = judge(
        case,
        alone,
        observations,
        setup.reference,
        setup.matrix.tolerances,
        backend_name=setup.backend.name,
        device=setup.machine.model,
    )
    if verdict.outcome != "passed":
        return _short(fault(case, setup, Outcome(verdict.outcome), f"the needle: {verdict.finding}"))
    share = split_sight(alone.steps[0], setup.reference)
    if share < LEAST:
        why = f"another split of the needle's keys changes the bits of {share:.0%} of its heads, {LEAST:.0%} are needed"
        return _short(fault(case, setup, Outcome.INSENSITIVE, why))
    counts = {"captures": trace.captures, "replays": trace.replays}
    result = Result(case.id, case.cell_id, case.kind, Outcome.PASSED, "", format_margin(verdict.margin), **counts)
    put = None if keep is None else partial(keep.put, case.id)
    kept = {(row.step, row.row): row.values for row in reversed(sums) if row.values is not None}
    return Composed(result, "", case_bits(alone, observations, case.cell.promise, keep=put, sums=kept), forced)


def _one_request(case: Case, variant: Variant, paths: Sequence[KernelPath]) -> tuple[Variant, tuple[Forced, ...]]:
    """``variant`` as a deterministic run drives it: a graph of a serial path has room for one request, and no pad."""
    from dsv4_matrix.cases.batch import GRAPH_MODES

    assert case.cell is not None
    forced: list[Forced] = []
    for path in paths if case.cell.mode in GRAPH_MODES else ():
        variant, more = serialise(variant, path, deterministic=True, field="bucket")
        forced += more
    return variant, tuple(forced)


def _disagreements(answers: Sequence[Answer], composition: Composition) -> list[str]:
    """Sentences on the needle's answers that are not the bits of the first one on their path."""
    from dsv4_matrix.judge.bits import first_difference

    first: dict[tuple[str, int], Answer] = {}
    told = []
    for answer in answers:
        seen = answer.observation
        other = first.setdefault((seen.leg, seen.step), answer)
        if other is answer:
            continue
        positions = [f"p{position}" for position in composition.alone.steps[seen.step].positions.tolist()]
        for name in ("out", "lse"):
            found = first_difference(getattr(other.observation, name), getattr(seen, name), positions)
            if found is not None:
                told.append(f"the needle's {name} in batch {answer.kind} is not that in batch {other.kind}: {found}")
    return told


def _unlike_sums(sums: Sequence[RowSums], composition: Composition) -> list[str]:
    """Sentences on accumulators that are not those of the same row in the first batch."""
    from dsv4_matrix.judge.bits import bit_equal, first_difference

    first: dict[tuple[int, int], RowSums] = {}
    told = []
    for row in sums:
        other = first.setdefault((row.step, row.row), row)
        key = f"p{int(composition.alone.steps[row.step].positions[row.row])}"
        place = f"the needle's accumulators of {key} in batch {row.kind} are not those in batch {other.kind}"
        if row.values is None or other.values is None or row.values.shape != other.values.shape:
            if row.values is not other.values:
                told.append(f"{place}: {_shape(row.values)} against {_shape(other.values)}")
        elif not bit_equal(row.values, other.values):
            told.append(f"{place}: {first_difference(other.values, row.values)}")
    return told


def _shape(values: Tensor | None) -> str:
    return "none" if values is None else str(list(values.shape))


def _short(done: Execution) -> Composed:
    """Without bits."""
    return Composed(done.result, done.message, None)
