"""The EAGLE draft runner: N - 1 decode steps over one attention backend each, in one graph, against serial decoding."""

from __future__ import annotations

from dataclasses import replace

import torch

from dsv4_matrix.cases.poison import poison_pools
from dsv4_matrix.cases.scenario import Placement, Scenario, Step
from dsv4_matrix.declaration.model import Variant
from dsv4_matrix.modes.capture import Outputs
from dsv4_matrix.modes.eager import Answer, check_promises, prepare
from dsv4_matrix.modes.padding import SEQ_LEN_FILL
from dsv4_matrix.modes.replay import IDLE, Replayer, replay_order
from dsv4_matrix.modes.static_step import StaticStep
from dsv4_matrix.modes.step import StepInputs, entries_stored, store_and_attend
from dsv4_matrix.modes.trace import LegEnded, Notebook
from dsv4_matrix.modes.watch import CacheWatch, InputWatch
from dsv4_matrix.protocol import BackendFactory, ForwardBatch, ForwardMode, MultiStepDraftBackend, RunnerConfig


def drive_draft_runner(scenario: Scenario, factory: BackendFactory, notebook: Notebook, variant: Variant) -> None:
    """Eager chains first, judged; then one captured chain replayed over every batch, equal to eager bit for bit.

    Batches alternate between the runner's own eager metadata and metadata made for each step on its own, as serial
    decoding would make it: both must give what the graph gives.
    """
    chain = variant.num_steps - 1
    chains = [
        _Chain(scenario.steps[start : start + chain], scenario.placements[start : start + chain], start, variant)
        for start in range(0, len(scenario.steps), chain)
    ]
    eager: list[list[Answer | None]] = []
    for per_step in (False, True):
        eager.append(_run_eager(scenario.runner, chains, factory, notebook, variant, per_step))
    for number, (together, alone) in enumerate(zip(*eager, strict=True)):
        if together is not None and alone is not None:
            notebook.check_bits(f"eager chain, step {number}", "the same with metadata made per step", together, alone)
            notebook.observe("eager chain", number, together)
    for number, answer in enumerate(_replay_all(scenario.runner, chains, factory, notebook, variant)):
        expected = eager[0][number] if eager[0] else None
        if answer is not None and expected is not None:
            notebook.check_bits(f"captured chain, step {number}", "the eager chain", answer, expected)


class _Chain:
    """One batch through all its draft steps."""

    def __init__(
        self, steps: tuple[Step, ...], placements: tuple[Placement, ...], first: int, variant: Variant
    ) -> None:
        self.steps = steps
        self.placements = placements
        self.first = first
        self.num_steps = variant.num_steps

    @property
    def rows(self) -> int:
        return self.steps[0].q.shape[0]

    def batch(self) -> ForwardBatch:
        """What the draft worker hands over: committed lengths, and the locations of all steps, request-major."""
        decode = self.placements[0].batch
        prefix = decode.seq_lens - 1
        table = self.placements[0].req_to_token
        position = prefix[:, None] + torch.arange(self.num_steps, device=prefix.device)
        location = table[decode.req_pool_indices[:, None], position].to(torch.int64)
        lengths = None if decode.seq_lens_cpu is None else [length - 1 for length in decode.seq_lens_cpu]
        return replace(
            decode, seq_lens=prefix, seq_lens_cpu=lengths, positions=prefix.clone(), out_cache_loc=location.flatten()
        )

    def inputs(self) -> list[StepInputs]:
        """The steps' own inputs, their batches as serial decoding would have them."""
        return [StepInputs.of(step, place) for step, place in zip(self.steps, self.placements, strict=True)]


def _run_eager(
    runner: RunnerConfig,
    chains: list[_Chain],
    factory: BackendFactory,
    notebook: Notebook,
    variant: Variant,
    per_step: bool,
) -> list[Answer | None]:
    answers: list[Answer | None] = [None] * sum(len(chain.steps) for chain in chains)
    leg = "eager chain, metadata per step" if per_step else "eager chain"
    try:
        multi = _build(runner, factory, notebook, variant, leg)
        for chain in chains:
            place = f"{leg}, steps from {chain.first}"
            prepare(multi.attn_backends[0], runner, chain.placements[0], 0, notebook, f"history of {place}")
            batch, inputs = chain.batch(), chain.inputs()
            watch = InputWatch(runner, *inputs, *[replace(inputs[0], batch=batch)])
            cache = CacheWatch(multi.attn_backends[0].kv_buffers())
            with notebook.backend_at_work(place, no_sync_on=runner.device if variant.gpu_only_lens else ""):
                if not per_step:
                    multi.init_forward_metadata(batch)
                for number, given in enumerate(inputs):
                    own = replace(given, batch=multi.step_batch(batch, number))
                    if per_step:
                        multi.attn_backends[number].init_forward_metadata(own.batch)
                    answer = store_and_attend(multi.attn_backends[number], own)
                    answers[chain.first + number] = notebook.take(f"{place}, forward {number}", answer, given.q)
            check_promises(notebook, place, watch, cache, sum(entries_stored(step) for step in chain.steps))
    except LegEnded:
        pass
    return answers


def _replay_all(
    runner: RunnerConfig, chains: list[_Chain], factory: BackendFactory, notebook: Notebook, variant: Variant
) -> list[Answer | None]:
    """Each step's first answer from the captured chain; None where none could be had."""
    bucket = max(1, variant.bucket, *(chain.rows for chain in chains))
    strided_q, on_host = variant.q_layout == "strided", not variant.gpu_only_lens
    statics = [
        StaticStep(step, bucket, 1, ForwardMode.DECODE, strided_q=strided_q, on_host=on_host)
        for step in chains[0].steps
    ]
    flat = _StaticChain(statics[0].inputs.batch, bucket, variant.num_steps)
    answers: list[Answer | None] = [None] * sum(len(chain.steps) for chain in chains)
    try:
        multi = _build(runner, factory, notebook, variant, "captured chain")
        backends = multi.attn_backends
        watched = [static.inputs for static in statics]
        replayer = Replayer(runner, notebook, backends[0].kv_buffers(), watched, variant.gpu_only_lens, answers)

        def prepare_capture() -> None:
            multi.init_cuda_graph_state(bucket, bucket)
            multi.init_forward_metadata_out_graph(flat.batch, in_capture=True)

        def chain_step() -> Outputs:
            multi.init_forward_metadata_in_graph(flat.batch)
            return tuple(
                _held(store_and_attend(backends[n], replace(inputs, batch=multi.step_batch(flat.batch, n))))
                for n, inputs in enumerate(watched)
            )

        graph = replayer.capture(prepare_capture, chain_step, multi.on_after_cuda_graph_warmup)
        for number in replay_order(len(chains), any(not chain.rows for chain in chains)):
            chain = None if number == IDLE else chains[number]
            place = f"replay {notebook.replays} of the chain, " + (f"steps from {chain.first}" if chain else "idle")
            if chain:
                again = answers[chain.first] is not None
                replayer.bring_up(backends[0], chain.placements[0], 0, place, again=again)
                for static, step, placement in zip(statics, chain.steps, chain.placements, strict=True):
                    static.fill(step, placement)
            else:
                for static in statics:
                    static.fill_idle()
            flat.fill(chain.batch() if chain and chain.rows else None)
            stored = sum(entries_stored(step) for step in chain.steps) if chain else 0
            replayer.replay(graph, lambda: multi.init_forward_metadata_out_graph(flat.batch), place, stored)
            if chain:
                for step_number, output in enumerate(graph.outputs):
                    replayer.settle(chain.first + step_number, output, chain.rows, place)
    except LegEnded:
        pass
    return answers


def _held(answer: Answer) -> Answer:
    """A copy inside the graph: the draft model consumes a step's output before the next step may reuse its memory."""
    return (answer[0].clone(), answer[1].clone()) if isinstance(answer, tuple) and len(answer) == 2 else answer


class _StaticChain:
    """The static batch of a captured chain: committed lengths, and the locations of all its steps."""

    def __init__(self, decode: ForwardBatch, bucket: int, num_steps: int) -> None:
        self.batch = replace(
            decode,
            req_pool_indices=decode.req_pool_indices.clone(),
            seq_lens=decode.seq_lens.clone(),
            positions=decode.positions.clone(),
            out_cache_loc=decode.out_cache_loc.new_zeros(bucket * num_steps),
        )
        self._on_host = decode.seq_lens_cpu is not None
        self.fill(None)
        # A capture is of the graph's own mode.
        self.batch.actual_forward_mode = None

    def fill(self, source: ForwardBatch | None) -> None:
        """Rows of ``source`` first, pad rows behind; None is a rank without requests."""
        batch = self.batch
        batch.seq_lens.fill_(SEQ_LEN_FILL)
        for integers in (batch.req_pool_indices, batch.positions, batch.out_cache_loc):
            integers.zero_()
        lengths: list[int] = []
        if source is not None:
            for name in ("seq_lens", "req_pool_indices", "positions", "out_cache_loc"):
                values = getattr(source, name)
                getattr(batch, name)[: len(values)] = values
            lengths = list(source.seq_lens_cpu or [])
        if self._on_host:
            batch.seq_lens_cpu = lengths + [SEQ_LEN_FILL] * (batch.batch_size - len(lengths))
        batch.actual_forward_mode = ForwardMode.IDLE if source is None else None


def _build(
    runner: RunnerConfig, factory: BackendFactory, notebook: Notebook, variant: Variant, leg: str
) -> MultiStepDraftBackend:
    place = f"{leg}, building the draft backends"
    with notebook.backend_at_work(place):
        multi = factory.multi_step(runner, num_steps=variant.num_steps, compress_ratio=0)
        backends = multi.attn_backends
    if len(backends) != variant.num_steps - 1:
        wanted = f"{variant.num_steps} steps need {variant.num_steps - 1} attention backends"
        notebook.violated(f"{place}: {wanted}, got {len(backends)}")
        raise LegEnded
    with notebook.backend_at_work(place):
        poison_pools(backends[0].kv_buffers())
    return multi
