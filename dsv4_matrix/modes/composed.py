"""Drives a composition: the needle's answers from every batch in which it stands, each under the name of its kind."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4_matrix.cases.batch import GRAPH_MODES
from dsv4_matrix.cases.compose import Composition, variant_for
from dsv4_matrix.cases.poison import garbage_selection, poison_pools
from dsv4_matrix.cases.scenario import Observation
from dsv4_matrix.declaration.model import Case, Variant
from dsv4_matrix.modes.drive import drive
from dsv4_matrix.modes.eager import prepare
from dsv4_matrix.modes.padding import PadSpec, pad
from dsv4_matrix.modes.step import StepInputs, run_eager_step
from dsv4_matrix.modes.trace import LegEnded, Notebook, Trace
from dsv4_matrix.protocol import BackendFactory, ForwardMode

#: Name of the batch that is the first one with pad requests behind it.
PADDED = "padded"
#: Pad requests of an eager batch; a graph has them behind every batch that is smaller than its bucket.
_PADS = 3


@dataclass(frozen=True)
class Answer:
    """What the needle was answered once: as ``Observation``, its rows only, its step that of the needle alone."""

    kind: str
    observation: Observation


def drive_composition(
    case: Case,
    composition: Composition,
    factory: BackendFactory,
    device: str,
    *,
    padded: bool = False,
    variant: Variant | None = None,
) -> tuple[Trace, tuple[Answer, ...]]:
    """Run all batches as ``case``'s mode does; the trace, and every answer to the needle. Raises as ``drive``.

    ``variant`` is what is driven, by default ``variant_for``. ``padded`` adds the first batch with pad requests behind
    it, where the mode is eager and pads requests at all.
    """
    assert case.cell is not None
    assert case.variant is not None
    driven = replace(case, variant=variant or variant_for(composition, case.variant))
    # The gate compares bits of what production runs, and so shows that a list may end in -1 too.
    trace = drive(driven, composition.scenario, factory, device, lists_as_they_are=True)
    answers: list[Answer] = []
    chunks: dict[tuple[str, str], list[Observation]] = {}
    for seen in trace.observations:
        own, kind = composition.own_step[seen.step], composition.kinds[seen.step]
        whole = composition.part[seen.step] == slice(0, composition.alone.steps[own].q.shape[0])
        for rows in composition.rows[seen.step]:
            needle = replace(seen, leg=_path(seen.leg), step=own, out=seen.out[rows], lse=seen.lse[rows])
            if whole:
                answers.append(Answer(kind, needle))
            else:
                chunks.setdefault((kind, needle.leg), []).append(needle)
    joined = [Answer(kind, _joined(parts)) for (kind, _), parts in chunks.items()]
    # A leg that ended before its last chunk has a violation of its own.
    rows_of = [composition.alone.steps[answer.observation.step].q.shape[0] for answer in joined]
    answers += [answer for answer, rows in zip(joined, rows_of, strict=True) if len(answer.observation.out) == rows]
    extend = any(placement.batch.forward_mode == ForwardMode.EXTEND for placement in composition.scenario.placements)
    if padded and case.cell.mode not in GRAPH_MODES and not extend and not trace.violations:
        more, violations = _padded(composition, factory)
        answers += more
        trace = replace(trace, violations=violations)
    return trace, tuple(answers)


def _joined(parts: list[Observation]) -> Observation:
    """The answers of a needle's chunks, in order, as one."""
    out, lse = torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts])
    return replace(parts[0], out=out, lse=lse)


def _path(leg: str) -> str:
    """Eager and graph legs go by one name, since their bits must agree; dense and sparse prefill have their own."""
    return leg if leg in ("dense", "sparse") else "needle"


def _padded(composition: Composition, factory: BackendFactory) -> tuple[list[Answer], tuple[str, ...]]:
    """The first batch with pad requests behind it, as data parallelism pads an eager batch: NaN in all they hold."""
    scenario, notebook = composition.scenario, Notebook()
    step, placement = scenario.steps[0], scenario.placements[0]
    if len(set(step.row_counts)) != 1:
        return [], ()
    requests, width = len(step.row_counts), step.row_counts[0]
    spec = PadSpec(requests, requests + _PADS, width)
    given = StepInputs.of(step, placement)
    selection = given.selection
    if selection is not None:
        pads = garbage_selection(_PADS * width, selection.shape[1], str(selection.device))
        selection = torch.cat([selection, pads.to(selection.dtype)])
    inputs = replace(
        given,
        batch=pad(placement.batch, spec),
        q=_with_nan(given.q, spec.padded_rows),
        k=_with_nan(given.k, spec.padded_rows),
        compressed=None if given.compressed is None else _with_nan(given.compressed, spec.padded_rows),
        selection=selection,
    )
    answers: list[Answer] = []
    try:
        with notebook.backend_at_work("padded eager batch"):
            backend = factory(scenario.runner)
            poison_pools(backend.kv_buffers())
        prepare(backend, scenario.runner, placement, step.ratio, notebook, "history of the padded batch")
        with notebook.backend_at_work("padded eager batch"):
            answer = notebook.take("padded eager batch", run_eager_step(backend, inputs), inputs.q)
        if answer is not None:
            for rows in composition.rows[0]:
                answers.append(Answer(PADDED, Observation("needle", 0, answer[0][rows], answer[1][rows])))
    except LegEnded:
        pass
    return answers, tuple(notebook.violations)


def _with_nan(values: Tensor, rows: int) -> Tensor:
    return torch.cat([values, values.new_full((rows - values.shape[0], *values.shape[1:]), float("nan"))])
