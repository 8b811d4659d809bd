"""Graph columns: one capture on a filling of pad rows, then replays over every batch of the case."""

from __future__ import annotations

from dsv4_matrix.cases.poison import poison_pools
from dsv4_matrix.cases.scenario import Scenario
from dsv4_matrix.declaration.model import Variant
from dsv4_matrix.modes.eager import Answer, run_leg, watched_eager_step
from dsv4_matrix.modes.replay import IDLE, Replayer, replay_order
from dsv4_matrix.modes.static_step import StaticStep
from dsv4_matrix.modes.step import entries_stored, run_captured_step
from dsv4_matrix.modes.trace import LegEnded, Notebook
from dsv4_matrix.protocol import BackendFactory


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


def _replay_all(
    scenario: Scenario, factory: BackendFactory, notebook: Notebook, variant: Variant
) -> list[Answer | None]:
    """Each step's first answer from the graph's backend; None where none could be had."""
    static = _static_step(scenario, variant)
    inputs, batch = static.inputs, static.inputs.batch
    answers: list[Answer | None] = [None] * len(scenario.steps)
    try:
        with notebook.backend_at_work("building the graph's backend"):
            backend = factory(scenario.runner)
            pools = backend.kv_buffers()
            poison_pools(pools)
        replayer = Replayer(scenario.runner, notebook, pools, [inputs], variant.gpu_only_lens, answers)

        def prepare_capture() -> None:
            backend.init_cuda_graph_state(batch.batch_size, len(batch.positions))
            backend.init_forward_metadata_out_graph(batch, in_capture=True)

        graph = replayer.capture(
            prepare_capture, lambda: (run_captured_step(backend, inputs),), backend.on_after_cuda_graph_warmup
        )
        empty = any(not step.q.shape[0] for step in scenario.steps)
        for number in replay_order(len(scenario.steps), empty):
            if number == IDLE:
                static.fill_idle()
                place = f"replay {notebook.replays}, idle"
                replayer.replay(graph, lambda: backend.init_forward_metadata_out_graph(batch), place, 0)
                continue
            step, placement = scenario.steps[number], scenario.placements[number]
            captured_mode = placement.batch.forward_mode == batch.forward_mode
            place = f"replay {notebook.replays}, step {number}" if captured_mode else f"step {number} between replays"
            replayer.bring_up(backend, placement, step.ratio, place, again=answers[number] is not None)
            if captured_mode:
                static.fill(step, placement)
                stored = entries_stored(step)
                replayer.replay(graph, lambda: backend.init_forward_metadata_out_graph(batch), place, stored)
                replayer.settle(number, graph.outputs[0], step.q.shape[0], place)
            elif (answer := watched_eager_step(backend, scenario.runner, step, placement, notebook, place)) is not None:
                answers[number] = answer
                notebook.observe(place, number, answer)
    except LegEnded:
        pass
    return answers


def _static_step(scenario: Scenario, variant: Variant) -> StaticStep:
    """Buffers for the largest batch of the captured mode, or for the declared bucket."""
    mode = scenario.placements[0].batch.forward_mode
    pairs = zip(scenario.steps, scenario.placements, strict=True)
    captured = [(step, placement.batch) for step, placement in pairs if placement.batch.forward_mode == mode]
    return StaticStep(
        scenario.steps[0],
        bucket=max(1, variant.bucket, *(batch.batch_size for _, batch in captured)),
        rows=max((count for step, _ in captured for count in step.row_counts), default=1),
        mode=mode,
        strided_q=variant.q_layout == "strided",
        on_host=not variant.gpu_only_lens,
    )
