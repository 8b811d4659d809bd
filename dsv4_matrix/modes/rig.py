"""A small served backend for probes: three requests with a history, and batches of any forward mode over them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dsv4_matrix.cases.poison import poison_pools
from dsv4_matrix.modes.step import StepInputs, run_eager_step
from dsv4_matrix.modes.trace import answer_faults
from dsv4_matrix.protocol import AttentionBackend, BackendFactory, ForwardBatch, ForwardMode, RunnerConfig

_PAGE, _HEAD_DIM, _HEADS, _TOPK = 256, 512, 16, 512
_REQUESTS, _HISTORY = 3, 12


def small_runner(device: str, prefill_path: str = "auto") -> RunnerConfig:
    """A runner of the supported configuration; request rows 1 to 3 have pages 4, 3 and 2, slots run backwards."""
    pages = _REQUESTS + 2
    table = torch.zeros(_REQUESTS + 1, _PAGE, dtype=torch.int32)
    for row in range(1, _REQUESTS + 1):
        table[row] = (pages - row) * _PAGE + torch.arange(_PAGE, dtype=torch.int32)
    mapping = torch.zeros(pages * _PAGE + 1, dtype=torch.int64)
    live = torch.arange(_PAGE, pages * _PAGE)
    mapping[live] = live.flip(0)
    mapping[-1] = -1
    return RunnerConfig(
        device=device,
        num_heads=_HEADS,
        head_dim=_HEAD_DIM,
        page_size=_PAGE,
        swa_page_size=_PAGE,
        num_pages=pages,
        num_swa_pages=pages,
        req_to_token=table.to(device),
        full_to_swa_index_mapping=mapping.to(device),
        index_topk=_TOPK,
        softmax_scale=_HEAD_DIM**-0.5,
        prefill_path=prefill_path,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=4,
    )


@dataclass(frozen=True)
class Rig:
    """What a probe's site works with.

    Attributes:
        factory: the backend under test.
        device: torch device string.
        ratio: compress ratio of the probed cell; 0 for a refusal outside the cells.
        prefill_path: of the runner.
    """

    factory: BackendFactory
    device: str
    ratio: int
    prefill_path: str = "auto"

    @cached_property
    def runner(self) -> RunnerConfig:
        return small_runner(self.device, self.prefill_path)

    @cached_property
    def backend(self) -> AttentionBackend:
        """Built on first use, poisoned, with a short history of each request."""
        backend = self.factory(self.runner)
        poison_pools(backend.kv_buffers())
        for row in range(1, _REQUESTS + 1):
            backend.set_key_buffer(self._locations(row, 0, _HISTORY), self.rows(_HISTORY, _HEAD_DIM))
        return backend

    def rows(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Plain finite numbers in [-0.5, 0.5]: a probe judges refusals, not results."""
        count = torch.Size(shape).numel()
        return ((torch.arange(count, dtype=torch.float32) * 37 % 101) / 101 - 0.5).view(shape).to(self.device, dtype)

    def query(self, rows: int, *, width: int = _HEAD_DIM, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return self.rows(rows, _HEADS, width, dtype=dtype)

    @property
    def sink(self) -> Tensor:
        return torch.zeros(_HEADS, dtype=torch.float32, device=self.device)

    def batch(self, mode: str, *, requests: int = 2, rows: int = 1) -> ForwardBatch:
        """Requests 1 .. ``requests``, ``rows`` new tokens each, after their history."""
        first = _HISTORY
        counts_rows = mode in (ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND, ForwardMode.SPLIT_PREFILL)
        verify = mode == ForwardMode.TARGET_VERIFY
        lengths = [first if verify else first + rows] * requests

        def integers(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self.device)

        locations = [self._locations(row, first, first + rows) for row in range(1, requests + 1)]
        return ForwardBatch(
            forward_mode=mode,
            req_pool_indices=integers(list(range(1, requests + 1))),
            seq_lens=integers(lengths),
            out_cache_loc=torch.cat(locations),
            positions=integers(list(range(first, first + rows)) * requests),
            seq_lens_cpu=lengths,
            extend_seq_lens=integers([rows] * requests) if counts_rows else None,
            extend_seq_lens_cpu=[rows] * requests if counts_rows else None,
            draft_token_num=rows if verify else None,
        )

    def step_inputs(self, batch: ForwardBatch, ratio: int) -> StepInputs:
        """All that a step of a layer with ``ratio`` is given; its C4 selection, if any, is empty."""
        rows = len(batch.positions)
        return StepInputs(
            batch,
            ratio,
            self.query(rows),
            self.rows(rows, _HEAD_DIM),
            self.rows(rows, _HEAD_DIM) if ratio else None,
            torch.full((rows, _TOPK), -1, dtype=torch.int32, device=self.device) if ratio == 4 else None,
            self.sink,
        )

    def serve(self, backend: AttentionBackend) -> str:
        """One small eager decode; what is wrong with its answer, or an empty string. Exceptions pass through."""
        batch = self.batch(ForwardMode.DECODE)
        answer = run_eager_step(backend, self.step_inputs(batch, 0))
        if faults := answer_faults(answer, batch.batch_size, _HEADS, _HEAD_DIM):
            return "; ".join(faults)
        out, lse = answer
        if not bool(out.isfinite().all() & lse.isfinite().all()):
            return "an answer that is not finite"
        return ""

    def with_runner(self, **changed: object) -> RunnerConfig:
        return replace(self.runner, **changed)  # type: ignore[arg-type]

    def _locations(self, row: int, start: int, end: int) -> Tensor:
        return self.runner.req_to_token[row, start:end].to(torch.int64)
