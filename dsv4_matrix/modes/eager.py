"""Eager columns: each step of a scenario in turn, through one backend or through the dense and the sparse path."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dsv4_matrix.cases.poison import poison_allocator, poison_pools
from dsv4_matrix.cases.scenario import Placement, Scenario, Step
from dsv4_matrix.modes.step import StepInputs, entries_stored, run_eager_step
from dsv4_matrix.modes.trace import LegEnded, Notebook
from dsv4_matrix.modes.watch import ENTRY_BYTES, CacheWatch, InputWatch
from dsv4_matrix.protocol import AttentionBackend, BackendFactory, ForwardMode, RunnerConfig

Answer = tuple[Tensor, Tensor]


def drive_eager(scenario: Scenario, factory: BackendFactory, notebook: Notebook, *, gpu_only_lens: bool) -> None:
    """Every step once. EXTEND runs through the dense and the sparse-prefill path, each in a fresh backend."""
    extends = any(placement.batch.forward_mode == ForwardMode.EXTEND for placement in scenario.placements)
    for leg in ("dense", "sparse") if extends else ("eager",):
        runner = replace(scenario.runner, prefill_path=leg) if extends else scenario.runner
        for number, answer in enumerate(run_leg(scenario, runner, factory, notebook, leg, gpu_only_lens)):
            if answer is not None:
                notebook.observe(leg, number, answer)


def run_leg(
    scenario: Scenario,
    runner: RunnerConfig,
    factory: BackendFactory,
    notebook: Notebook,
    leg: str,
    gpu_only_lens: bool,
) -> list[Answer | None]:
    """All steps through one fresh backend; None where a step's answer was refused."""
    answers: list[Answer | None] = [None] * len(scenario.steps)
    try:
        with notebook.backend_at_work(f"{leg} leg, building the backend"):
            backend = factory(runner)
            poison_pools(backend.kv_buffers())
        for number, (step, placement) in enumerate(zip(scenario.steps, scenario.placements, strict=True)):
            prepare(backend, runner, placement, step.ratio, notebook, f"{leg} leg, history of step {number}")
            answers[number] = watched_eager_step(
                backend, runner, step, placement, notebook, f"{leg} leg, step {number}", gpu_only_lens
            )
    except LegEnded:
        pass
    return answers


def prepare(
    backend: AttentionBackend, runner: RunnerConfig, placement: Placement, ratio: int, notebook: Notebook, place: str
) -> None:
    """What the scheduler did since the last step: its tables, in place, and the history of requests that are new."""
    apply_tables(runner, placement)
    with notebook.backend_at_work(place):
        if placement.history_loc.numel():
            backend.set_key_buffer(placement.history_loc, placement.history_k)
        if placement.entry_loc is not None and placement.entry_k is not None and placement.entry_loc.numel():
            backend.set_extra_key_buffer(ratio, placement.entry_loc, placement.entry_k)


def apply_tables(runner: RunnerConfig, placement: Placement) -> None:
    """The scheduler's tables of a step, in place."""
    runner.req_to_token.copy_(placement.req_to_token)
    runner.full_to_swa_index_mapping.copy_(placement.mapping)


def watched_eager_step(
    backend: AttentionBackend,
    runner: RunnerConfig,
    step: Step,
    placement: Placement,
    notebook: Notebook,
    place: str,
    gpu_only_lens: bool = False,
) -> Answer | None:
    """One eager step with its promises checked: shapes, inputs left alone, no byte written that it does not own.

    What it stores must be seen: a pool that ``kv_buffers`` leaves out is neither poisoned nor watched.
    """
    inputs = StepInputs.of(step, placement)
    watch, cache = InputWatch(runner, inputs), CacheWatch(backend.kv_buffers())
    rows, heads, head_dim = step.q.shape
    poison_allocator((((rows, heads, head_dim), torch.bfloat16), ((rows, heads), torch.float32)), runner.device)
    with notebook.backend_at_work(place, no_sync_on=runner.device if gpu_only_lens else ""):
        answer: Answer = run_eager_step(backend, inputs)
    entries = entries_stored(step)
    if not check_promises(notebook, place, watch, cache, entries) and entries:
        notebook.violated(
            f"{place}: the step stores {entries} entries, and no cache byte changed; kv_buffers must give all pools"
        )
    return notebook.take(place, answer, step.q)


def check_promises(notebook: Notebook, place: str, watch: InputWatch, cache: CacheWatch, entries: int) -> int:
    """Inputs unchanged, and no more cache bytes changed than the ``entries`` that the step stores.

    Returns the number of bytes that changed, none where a step is repeated.
    """
    written = watch.written()
    if written:
        notebook.violated(f"{place}: the backend wrote its inputs: {', '.join(written)}")
    changed, in_dummy = cache.changed()
    if in_dummy:
        notebook.violated(f"{place}: {in_dummy} bytes of the dummy page changed; pad rows store nothing, even there")
    if changed > ENTRY_BYTES * entries:
        allowed = f"{entries} entries of {ENTRY_BYTES} bytes" if entries else "no entry at all"
        notebook.violated(f"{place}: {changed} cache bytes changed; the step stores {allowed}")
    return changed
