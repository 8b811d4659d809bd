"""Builds a scenario: the declaration's variant as tensors, drawn from the case's seed on a CPU and moved."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dsv4_matrix.cases.batch import DRAFT_RUNNER, StepPlan, plan_steps
from dsv4_matrix.cases.content import HEAD_DIM, Bank, Content
from dsv4_matrix.cases.layout import Layout, Tables, lay_out
from dsv4_matrix.cases.queries import USUAL, draw_queries, select, sinks
from dsv4_matrix.cases.scenario import Placement, Scenario, Step
from dsv4_matrix.declaration.model import Case, Matrix, Variant
from dsv4_matrix.protocol import ForwardBatch, ForwardMode, RunnerConfig

_SPECULATIVE = frozenset({ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND})
#: Elements between heads of a strided query: a slice of a wider projection.
_STRIDED_WIDTH = HEAD_DIM + 64


def build_scenario(case: Case, matrix: Matrix, device: str) -> Scenario:
    """The scenario of ``case`` on ``device``: equal bytes in every process, order, worker and device.

    Raises ValueError for a case that is a probe, and for a variant value that the declaration should have refused.
    """
    if case.cell is None or case.variant is None:
        raise ValueError(f"{case.id}: a {case.kind} has no scenario; only variants of covered cells have one")
    return assemble(case, plan_steps(case.cell.mode, case.variant), matrix, device)


def assemble(case: Case, plans: tuple[StepPlan, ...], matrix: Matrix, device: str, roles: str = USUAL) -> Scenario:
    """A scenario of these steps in the manner of ``case``: its seed, and all of its variant but the lengths.

    ``roles`` of the heads are those of ``queries.draw_queries``.
    """
    assert case.cell is not None
    assert case.variant is not None
    variant, ratio, seed = case.variant, case.cell.ratio, case.seed
    layout = lay_out(case.cell.mode, variant, plans, ratio, seed, device)
    content = Content(plans, ratio, seed, device)
    runner = _runner(case, variant, plans, layout, matrix, device)
    sink = sinks(variant.sink, variant.heads, seed)
    steps: list[Step] = []
    placements: list[Placement] = []
    written: dict[int, int] = {}
    for number, plan in enumerate(plans):
        bank = content.bank(plan)
        step = _step(plan, bank, variant, ratio, sink, runner.softmax_scale, seed, number, device, roles)
        steps.append(step)
        placements.append(_placement(plan, bank, step, layout, variant, ratio, written, device))
    return Scenario(case.id, seed, runner, tuple(steps), tuple(placements))


def _runner(
    case: Case, variant: Variant, plans: tuple[StepPlan, ...], layout: Layout, matrix: Matrix, device: str
) -> RunnerConfig:
    assert case.cell is not None
    chain = case.cell.mode == DRAFT_RUNNER or any(plan.mode in _SPECULATIVE for plan in plans)
    drafts = max((span.rows for plan in plans for span in plan.spans), default=1)
    return RunnerConfig(
        device=device,
        num_heads=variant.heads,
        head_dim=matrix.geometry.head_dim,
        page_size=matrix.geometry.page_size,
        swa_page_size=variant.swa_page_size,
        num_pages=layout.num_pages,
        num_swa_pages=layout.num_swa_pages,
        req_to_token=layout.groups[0].req_to_token.clone(),
        full_to_swa_index_mapping=layout.groups[0].mapping.clone(),
        index_topk=variant.index_topk,
        softmax_scale=matrix.geometry.head_dim**-0.5,
        speculative_eagle_topk=1 if chain else 0,
        speculative_num_draft_tokens=max(drafts, variant.num_steps) if chain else 0,
    )


def _step(
    plan: StepPlan,
    bank: Bank,
    variant: Variant,
    ratio: int,
    sink: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
    scale: float,
    seed: int,
    number: int,
    device: str,
    roles: str,
) -> Step:
    counts = [span.rows for span in plan.spans]
    request = np.repeat(np.arange(len(counts)), counts)
    positions = np.concatenate([np.arange(s.prefix, s.total) for s in plan.spans]) if counts else np.empty(0, np.int64)
    selection = None
    if ratio == 4:
        selection = select(positions, variant.index_topk, variant.pages != "identity", seed, number)
    q = draw_queries(bank, ratio, request, positions, selection, sink, scale, seed, number, roles)
    rows = torch.from_numpy(bank.token_base[request] + positions).to(device)
    compressed = None
    if ratio:
        emits = np.flatnonzero((positions + 1) % ratio == 0)
        entry = (bank.entry_base[request] + positions // ratio)[emits]
        compressed = torch.full((len(rows), HEAD_DIM), float("nan"), dtype=torch.bfloat16, device=device)
        compressed[torch.from_numpy(emits).to(device)] = bank.entries[torch.from_numpy(entry).to(device)]
    return Step(
        ratio=ratio,
        request=torch.from_numpy(request).to(device),
        positions=torch.from_numpy(positions).to(device),
        prefix_lens=tuple(span.prefix for span in plan.spans),
        row_counts=tuple(counts),
        tokens=bank.tokens,
        token_base=torch.from_numpy(bank.token_base).to(device),
        entries=bank.entries,
        entry_base=torch.from_numpy(bank.entry_base).to(device),
        selection=None if selection is None else torch.from_numpy(selection.astype(np.int32)).to(device),
        q=laid_out_query(q, variant.q_layout),
        sink=torch.from_numpy(sink.copy()).to(device),
        k=bank.tokens[rows],
        compressed=compressed,
        softmax_scale=scale,
    )


def laid_out_query(q: Tensor, layout: str) -> Tensor:
    """``q`` as it is (``contiguous``), or as a slice of a wider tensor that holds NaN beside it (``strided``)."""
    if layout == "contiguous":
        return q
    if layout != "strided":
        raise ValueError(f"q_layout {layout!r} is not one of contiguous, strided")
    wide = torch.full((*q.shape[:2], _STRIDED_WIDTH), float("nan"), dtype=q.dtype, device=q.device)
    wide[..., :HEAD_DIM] = q
    return wide[..., :HEAD_DIM]


def _placement(
    plan: StepPlan,
    bank: Bank,
    step: Step,
    layout: Layout,
    variant: Variant,
    ratio: int,
    written: dict[int, int],
    device: str,
) -> Placement:
    """Locations of the step's rows, and the history that nobody has stored yet (``written``: tokens a request has)."""
    tables = layout.groups[plan.group]
    bases = zip(bank.token_base.tolist(), bank.entry_base.tolist(), strict=True)
    history: list[tuple[np.ndarray[tuple[int, ...], np.dtype[np.int64]], Tensor]] = []
    entries: list[tuple[np.ndarray[tuple[int, ...], np.dtype[np.int64]], Tensor]] = []
    for span, (token_base, entry_base) in zip(plan.spans, bases, strict=False):
        location = tables.locations[span.request]
        if span.request not in written:
            alive = tables.resident[span.request][: span.prefix]
            keys = bank.tokens[token_base : token_base + span.prefix]
            history.append((location[: span.prefix][alive], keys[torch.from_numpy(np.flatnonzero(alive)).to(device)]))
            if ratio:
                count = span.prefix // ratio
                entries.append((location[ratio - 1 : count * ratio : ratio], bank.entries[entry_base:][:count]))
        written[span.request] = span.prefix + span.kept
    history_loc, history_k = _gathered(history, device)
    entry_loc, entry_k = _gathered(entries, device) if ratio else (None, None)
    return Placement(
        batch=_batch(plan, step, tables, variant, device),
        history_loc=history_loc,
        history_k=history_k,
        entry_loc=entry_loc,
        entry_k=entry_k,
        req_to_token=tables.req_to_token,
        mapping=tables.mapping,
    )


def _gathered(
    parts: list[tuple[np.ndarray[tuple[int, ...], np.dtype[np.int64]], Tensor]], device: str
) -> tuple[Tensor, Tensor]:
    location = np.concatenate([np.empty(0, np.int64), *(where for where, _ in parts)])
    keys = torch.cat([torch.empty(0, HEAD_DIM, dtype=torch.bfloat16, device=device), *(what for _, what in parts)])
    return torch.from_numpy(location).to(device), keys


def _batch(plan: StepPlan, step: Step, tables: Tables, variant: Variant, device: str) -> ForwardBatch:
    """The scheduler's batch: real rows only, lengths as each forward mode counts them (``protocol.ForwardBatch``)."""
    verify = plan.mode is ForwardMode.TARGET_VERIFY
    extends = plan.mode in (ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND)
    lengths = [span.prefix if verify else span.total for span in plan.spans]
    rows = [span.rows for span in plan.spans]
    locations = [tables.locations[span.request][span.prefix : span.total] for span in plan.spans]
    on_host = not variant.gpu_only_lens

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    uniform = len(set(rows)) <= 1
    return ForwardBatch(
        forward_mode=plan.mode,
        req_pool_indices=tensor([tables.rows[span.request] for span in plan.spans]),
        seq_lens=tensor(lengths),
        out_cache_loc=torch.from_numpy(np.concatenate([np.empty(0, np.int64), *locations])).to(device),
        positions=step.positions.clone(),
        seq_lens_cpu=lengths if on_host else None,
        extend_seq_lens=tensor(rows) if extends else None,
        extend_seq_lens_cpu=rows if extends and on_host else None,
        draft_token_num=max(rows, default=0) if verify else None,
        verify_lens=tensor(rows) if verify and not uniform else None,
    )
