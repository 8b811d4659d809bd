"""Graph columns: one capture on a filling of pad rows, then replays over every batch of the case."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsv4_matrix.cases.poison import poison_pools
from dsv4_matrix.cases.scenario import Scenario
from dsv4_matrix.declaration.model import Variant
from dsv4_matrix.modes.capture import CapturedStep, Outputs, capture
from dsv4_matrix.modes.eager import Answer, apply_tables, check_promises, prepare, run_leg, watched_eager_step
from dsv4_matrix.modes.static_step import StaticStep
from dsv4_matrix.modes.step import entries_stored, run_captured_step
from dsv4_matrix.modes.trace import LegEnded, Notebook
from dsv4_matrix.modes.watch import CacheWatch, InputWatch
from dsv4_matrix.protocol import BackendFactory

#: Stands for an idle replay in an order of steps.
IDLE = -1


def drive_graph(scenario: Scenario, factory: BackendFactory, notebook: Notebook, variant: Variant) -> None:
    """Capture once, replay over all batches, and compare each replay bit for bit with an eager run of the same rows.

    The eager run is of real rows only and in a fresh backend, so that agreement also says: pad rows change nothing,
    and nothing of an earlier replay shows. Steps of another forward mode (the decode step behind a verify) run eagerly
    in the graph's backend, between its replays.
    """
    answers = _replay_all(scenario, factory, notebook, variant)
    eager = run_leg(scenario, scenario.runner, factory, notebook, "eager", False)
    for number, (replayed, expected) in enumerate(zip(answers, eager, strict=True)):
        if replayed is not None and expected is not None:
            notebook.check_bits(f"step {number} in the graph's backend", "the eager run", replayed, expected)


def replay_order(steps: int, empty: Sequence[int]) -> list[int]:
    """Every step in turn, an idle replay if the case has none of its own, and the first step once more."""
    return [*range(steps), *([] if empty else [IDLE]), 0]


def _replay_all(
    scenario: Scenario, factory: BackendFactory, notebook: Notebook, variant: Variant
) -> list[Answer | None]:
    steps, placements, runner = scenario.steps, scenario.placements, scenario.runner
    answers: list[Answer | None] = [None] * len(steps)
    captured_mode = placements[0].batch.forward_mode
    in_graph = [n for n, placement in enumerate(placements) if placement.batch.forward_mode == captured_mode]
    bucket = max(variant.bucket, *(placements[n].batch.batch_size for n in in_graph), 1)
    rows = max((count for n in in_graph for count in steps[n].row_counts), default=1)
    empty = [n for n in in_graph if not steps[n].q.shape[0]]
    static = StaticStep(
        steps[0],
        bucket,
        rows,
        captured_mode,
        strided_q=variant.q_layout == "strided",
        on_host=not variant.gpu_only_lens,
    )
    try:
        with notebook.backend_at_work("graph leg, building the backend"):
            backend = factory(runner)
            poison_pools(backend.kv_buffers())
        before = CacheWatch(backend.kv_buffers())
        with notebook.backend_at_work("graph leg, capture"):
            backend.init_cuda_graph_state(bucket, bucket * rows)
            backend.init_forward_metadata_out_graph(static.inputs.batch, in_capture=True)
            graph = captured(
                notebook,
                lambda: (run_captured_step(backend, static.inputs),),
                backend.on_after_cuda_graph_warmup,
                runner.device,
            )
        check_capture(notebook, graph, before, [steps[0].q.shape[1:]], bucket * rows)
        for number in replay_order(len(steps), empty):
            step, placement = steps[max(number, 0)], placements[max(number, 0)]
            place = f"replay {notebook.replays}, " + ("idle" if number == IDLE else f"step {number}")
            if number != IDLE and answers[number] is not None:
                # The step once more: its history is in the pool since its first replay.
                apply_tables(runner, placement)
            elif number != IDLE:
                prepare(backend, runner, placement, step.ratio, notebook, f"history of {place}")
            if placement.batch.forward_mode != captured_mode:
                place = f"step {number}, eager between replays"
                answers[number] = watched_eager_step(backend, runner, step, placement, notebook, place)
                if (answer := answers[number]) is not None:
                    notebook.observe("between replays", number, answer)
                continue
            if number == IDLE:
                static.fill_idle()
            else:
                static.fill(step, placement)
            watch, cache = InputWatch(runner, static.inputs), CacheWatch(backend.kv_buffers())
            poison_outputs(graph.outputs)
            with notebook.backend_at_work(place, no_sync_on=runner.device if variant.gpu_only_lens else ""):
                backend.init_forward_metadata_out_graph(static.inputs.batch)
            with notebook.backend_at_work(place):
                graph.replay()
            notebook.replays += 1
            check_promises(notebook, place, watch, cache, 0 if number == IDLE else entries_stored(step))
            if number == IDLE:
                continue
            answer = live_rows(graph.outputs[0], step.q.shape[0])
            first = answers[number]
            if first is None:
                answers[number] = answer
                notebook.observe(place, number, answer, graph=True)
            else:
                notebook.check_bits(place, "the same step's first replay", answer, first)
    except LegEnded:
        pass
    return answers


def captured(
    notebook: Notebook, step: Callable[[], Outputs], after_warmup: Callable[[], None], device: str
) -> CapturedStep:
    """``capture``, counted."""
    graph = capture(step, after_warmup=after_warmup, device=device)
    notebook.captures += 1
    return graph


def check_capture(
    notebook: Notebook, graph: CapturedStep, cache: CacheWatch, shapes: Sequence[torch.Size], rows: int
) -> None:
    """Something was captured, its outputs have their shapes, and its pad rows wrote no cache byte."""
    if not graph.recorded:
        notebook.violated("capture: the graph holds nothing; the step ran outside of it")
    for sync in graph.syncs:
        notebook.violated(f"capture: {sync} (the backend caught the error)")
    changed, _ = cache.changed()
    if changed:
        notebook.violated(f"capture: {changed} cache bytes changed, though every row of the capture is a pad row")
    for number, ((heads, head_dim), answer) in enumerate(zip(shapes, graph.outputs, strict=True)):
        if not notebook.check_answer(f"capture, forward {number}", answer, rows, heads, head_dim):
            raise LegEnded


def poison_outputs(outputs: Outputs) -> None:
    for out, lse in outputs:
        out.fill_(float("nan"))
        lse.fill_(float("nan"))


def live_rows(output: tuple[Tensor, Tensor], rows: int) -> Answer:
    """Copies, because the next replay overwrites the graph's memory."""
    return output[0][:rows].clone(), output[1][:rows].clone()
