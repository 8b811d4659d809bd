"""One replay and what is demanded of it, for every column that captures: single steps and draft chains alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv4_matrix.cases.scenario import Placement
from dsv4_matrix.modes.capture import CapturedStep, Outputs, capture
from dsv4_matrix.modes.eager import Answer, apply_tables, check_promises, prepare
from dsv4_matrix.modes.step import StepInputs
from dsv4_matrix.modes.trace import LegEnded, Notebook
from dsv4_matrix.modes.watch import CacheWatch, InputWatch
from dsv4_matrix.protocol import AttentionBackend, RunnerConfig

#: Stands for an idle replay in an order of batches.
IDLE = -1


def replay_order(batches: int, empty: bool) -> list[int]:
    """Every batch in turn, an idle replay unless the case has an ``empty`` one, and the first batch once more."""
    return [*range(batches), *([] if empty else [IDLE]), 0]


@dataclass
class Replayer:
    """A graph's side of a leg.

    Attributes:
        runner: the scheduler's tables.
        notebook: where captures, replays and violations go.
        pools: all cache bytes.
        watched: static inputs, which nobody but the harness writes.
        gpu_only_lens: preparing a replay may not wait for the device.
        answers: first answer of each step of the scenario, None so far.
    """

    runner: RunnerConfig
    notebook: Notebook
    pools: Mapping[str, Tensor]
    watched: Sequence[StepInputs]
    gpu_only_lens: bool
    answers: list[Answer | None] = field(default_factory=list)

    def capture(
        self, prepare_capture: Callable[[], None], step: Callable[[], Outputs], after_warmup: Callable[[], None]
    ) -> CapturedStep:
        """Capture ``step`` on static inputs that hold pad rows only.

        Something must be captured, its outputs must have their shapes, and pad rows must write no cache byte.
        """
        watch, cache = InputWatch(self.runner, *self.watched), CacheWatch(self.pools)
        with self.notebook.backend_at_work("capture"):
            prepare_capture()
            graph = capture(step, after_warmup=after_warmup, device=self.runner.device)
        self.notebook.captures += 1
        check_capture(self.notebook, graph, [inputs.q.shape for inputs in self.watched])
        check_promises(self.notebook, "capture", watch, cache, 0)
        return graph

    def bring_up(self, backend: AttentionBackend, placement: Placement, ratio: int, place: str, *, again: bool) -> None:
        """The scheduler's tables, and the history unless the pool has it since the batch ran before (``again``)."""
        if again:
            apply_tables(self.runner, placement)
        else:
            prepare(backend, self.runner, placement, ratio, self.notebook, f"history of {place}")

    def replay(self, graph: CapturedStep, prepare_replay: Callable[[], None], place: str, entries: int) -> None:
        """One replay over poisoned outputs, which stores ``entries`` cache entries and writes nothing else."""
        watch, cache = InputWatch(self.runner, *self.watched), CacheWatch(self.pools)
        for out, lse in graph.outputs:
            out.fill_(float("nan"))
            lse.fill_(float("nan"))
        with self.notebook.backend_at_work(place, no_sync_on=self.runner.device if self.gpu_only_lens else ""):
            prepare_replay()
        with self.notebook.backend_at_work(place):
            graph.replay()
        self.notebook.replays += 1
        check_promises(self.notebook, place, watch, cache, entries)

    def settle(self, number: int, output: tuple[Tensor, Tensor], rows: int, place: str) -> None:
        """Observe a step's live rows the first time; later times they must be the same bits."""
        # Copied, because the next replay overwrites the graph's memory.
        answer = output[0][:rows].clone(), output[1][:rows].clone()
        first = self.answers[number]
        if first is None:
            self.answers[number] = answer
            self.notebook.observe(place, number, answer, graph=True)
        else:
            self.notebook.check_bits(place, "the same step's first replay", answer, first)


def check_capture(notebook: Notebook, graph: CapturedStep, shapes: Sequence[torch.Size]) -> None:
    """Something was captured, without a hidden host sync, and its outputs fit queries of ``shapes``."""
    if not graph.recorded:
        notebook.violated("capture: the graph holds nothing; the step ran outside of it")
    for sync in graph.syncs:
        notebook.violated(f"capture: {sync} (the backend caught the error)")
    for number, (shape, answer) in enumerate(zip(shapes, graph.outputs, strict=True)):
        if not notebook.check_answer(f"capture, forward {number}", answer, *shape):
            raise LegEnded
