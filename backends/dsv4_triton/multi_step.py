"""The EAGLE draft runner's attention: one backend a draft step, over shared pools.

N steps are N - 1 attention forwards, the last step only samples. Step s is a decode at position prefix + s: its
window ends at itself and holds the keys of earlier steps, as in serial decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from dsv4_triton.refusals import check_draft_runner, refuse
from dsv4_triton.runner import DECODE, IDLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from dsv4_triton.cache import KVCache
    from dsv4_triton.forward_metadata import DSV4Metadata
    from dsv4_triton.runner import ForwardBatch, RunnerConfig


class StepBackend(Protocol):
    """What the draft asks of the backend of one step; ``DSV4TritonBackend`` is one, and says what each call does."""

    cache: KVCache

    def __init__(self, runner: RunnerConfig, cache: KVCache | None = None) -> None: ...

    @property
    def has_static_inputs(self) -> bool: ...

    def init_forward_metadata(self, batch: ForwardBatch) -> None: ...

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None: ...

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, *, in_capture: bool = False) -> None: ...

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None: ...

    def prepare_forward_metadata_for_breakable_cuda_graph_replay(
        self,
        capture_metadata: DSV4Metadata,
        live_batch: ForwardBatch,
        *,
        static_forward_batch: ForwardBatch | None = None,
    ) -> None: ...

    def on_after_cuda_graph_warmup(self) -> None: ...


Backend = TypeVar("Backend", bound=StepBackend)


@dataclass
class StepBatch:
    """The DECODE batch of one draft step; fields as in ``runner.ForwardBatch``."""

    forward_mode: str
    req_pool_indices: Tensor
    seq_lens: Tensor
    out_cache_loc: Tensor
    positions: Tensor
    seq_lens_cpu: Sequence[int] | None = None
    extend_seq_lens: Tensor | None = None
    extend_seq_lens_cpu: Sequence[int] | None = None
    draft_token_num: int | None = None
    verify_lens: Tensor | None = None
    actual_forward_mode: str | None = None

    @property
    def batch_size(self) -> int:
        return self.seq_lens.shape[0]


class DSV4TritonMultiStepBackend(Generic[Backend]):
    """``num_steps - 1`` backends of class ``backend_class``; ``batch`` is always the flat one of the whole draft.

    Its ``seq_lens`` is the committed prefix and its ``out_cache_loc`` ``[bs * num_steps]`` is request-major.

    Raises:
        ValueError: ratio other than 0 (the draft layer is SWA-only), or ``num_steps`` outside 2 to 5.
    """

    def __init__(
        self, backend_class: type[Backend], runner: RunnerConfig, *, num_steps: int, compress_ratio: int = 0
    ) -> None:
        check_draft_runner(runner, num_steps, compress_ratio)
        self.num_steps = num_steps
        first = backend_class(runner)
        later = [backend_class(runner, first.cache) for _ in range(num_steps - 2)]
        self._backends = (first, *later)

    @property
    def attn_backends(self) -> Sequence[Backend]:
        """The N - 1 backends, in step order."""
        return self._backends

    def step_batch(self, batch: ForwardBatch, step: int) -> StepBatch:
        """The DECODE batch of step ``step``: device arithmetic only, so it may run inside a capture.

        AssertionError if ``out_cache_loc`` is not ``bs * num_steps`` long; IndexError for a step that does not attend.
        """
        bs = batch.seq_lens.shape[0]
        if not 0 <= step < len(self._backends):
            raise IndexError(
                f"DSV4TritonMultiStepBackend.step_batch: step {step}; {self.num_steps} steps attend in 0 to "
                f"{len(self._backends) - 1}"
            )
        if batch.out_cache_loc.shape[0] != bs * self.num_steps:
            refuse(
                AssertionError,
                f"out_cache_loc of {batch.out_cache_loc.shape[0]} for {bs} requests",
                f"bs * topk * num_steps = {bs * self.num_steps}, request-major, topk 1",
                "multi_step.step_batch",
            )
        lens_cpu = batch.seq_lens_cpu
        return StepBatch(
            forward_mode=IDLE if batch.forward_mode == IDLE else DECODE,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens + (step + 1),
            out_cache_loc=batch.out_cache_loc.view(bs, self.num_steps)[:, step].contiguous(),
            positions=batch.seq_lens + step,
            seq_lens_cpu=None if lens_cpu is None else [int(length) + step + 1 for length in lens_cpu],
            actual_forward_mode=batch.actual_forward_mode,
        )

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Eager metadata of every step."""
        for step, backend in enumerate(self._backends):
            backend.init_forward_metadata(self.step_batch(batch, step))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Graph state of every step: a draft step has one row a request, however many tokens the draft has."""
        for backend in self._backends:
            backend.init_cuda_graph_state(max_bs, max_bs)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, *, in_capture: bool = False) -> None:
        """Before a capture or a replay of the whole draft: the inputs of every step."""
        for step, backend in enumerate(self._backends):
            backend.init_forward_metadata_out_graph(self.step_batch(batch, step), in_capture=in_capture)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """The recorded part of every step. Each reads static inputs of its own, so ``batch`` is only sliced eagerly."""
        for step, backend in enumerate(self._backends):
            own = batch if backend.has_static_inputs else self.step_batch(batch, step)
            backend.init_forward_metadata_in_graph(own)

    def prepare_forward_metadata_for_breakable_cuda_graph_replay(
        self,
        capture_metadata: Sequence[DSV4Metadata],
        live_batch: ForwardBatch,
        *,
        static_forward_batch: ForwardBatch | None = None,
    ) -> None:
        """Refresh the captured metadata of every step; AssertionError unless there is one for each."""
        if len(capture_metadata) != len(self._backends):
            refuse(
                AssertionError,
                f"captured metadata of {len(capture_metadata)} steps",
                f"{len(self._backends)}, one for each of num_steps - 1 forwards",
                "multi_step.prepare_forward_metadata_for_breakable_cuda_graph_replay",
            )
        for step, (backend, captured) in enumerate(zip(self._backends, capture_metadata, strict=True)):
            static = None if static_forward_batch is None else self.step_batch(static_forward_batch, step)
            backend.prepare_forward_metadata_for_breakable_cuda_graph_replay(
                captured, self.step_batch(live_batch, step), static_forward_batch=static
            )

    def on_after_cuda_graph_warmup(self) -> None:
        """Between warm-up and capture, for every step."""
        for backend in self._backends:
            backend.on_after_cuda_graph_warmup()
