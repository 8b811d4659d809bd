"""The static buffers of a captured step: one ForwardBatch and its inputs, filled in place before every replay."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_matrix.cases.build import laid_out_query
from dsv4_matrix.cases.poison import garbage_selection
from dsv4_matrix.cases.scenario import Placement, Step
from dsv4_matrix.modes.step import StepInputs
from dsv4_matrix.protocol import ForwardBatch, ForwardMode

#: ``seq_lens`` of a pad request, as serving engines fill it.
SEQ_LEN_FILL = 1


class StaticStep:
    """Buffers for ``bucket`` requests of ``rows`` rows each.

    Pad rows hold what a scheduler leaves (length 1, request row 0, location 0) and, in q, K and compressed rows, NaN,
    in the selection garbage: nothing of a pad row may reach a live one or a cache.
    """

    def __init__(self, like: Step, bucket: int, rows: int, mode: str, *, strided_q: bool, on_host: bool) -> None:
        device = str(like.q.device)
        total, (_, heads, head_dim) = bucket * rows, like.q.shape

        def integers(count: int, value: int) -> Tensor:
            return torch.full((count,), value, dtype=torch.int64, device=device)

        def keys() -> Tensor:
            return torch.full((total, head_dim), float("nan"), dtype=torch.bfloat16, device=device)

        self._bucket, self._rows, self._on_host = bucket, rows, on_host
        empty_q = torch.full((total, heads, head_dim), float("nan"), dtype=torch.bfloat16, device=device)
        width = like.selection.shape[1] if like.selection is not None else 0
        self._garbage = garbage_selection(total, width, device)
        self.inputs = StepInputs(
            batch=ForwardBatch(
                forward_mode=mode,
                req_pool_indices=integers(bucket, 0),
                seq_lens=integers(bucket, SEQ_LEN_FILL),
                out_cache_loc=integers(total, 0),
                positions=integers(total, 0),
                extend_seq_lens=integers(bucket, rows) if mode == ForwardMode.DRAFT_EXTEND else None,
                draft_token_num=rows if mode == ForwardMode.TARGET_VERIFY else None,
            ),
            ratio=like.ratio,
            q=laid_out_query(empty_q, "strided" if strided_q else "contiguous"),
            k=keys(),
            compressed=keys() if like.compressed is not None else None,
            selection=self._garbage.clone() if like.selection is not None else None,
            sink=like.sink.clone(),
        )
        self.fill_pads()

    def fill_idle(self) -> None:
        """A rank without requests."""
        self.fill_pads()
        self.inputs.batch.actual_forward_mode = ForwardMode.IDLE

    def fill_pads(self) -> None:
        """Pad rows only, as for a capture: the mode is the graph's own."""
        batch = self.inputs.batch
        batch.seq_lens.fill_(SEQ_LEN_FILL)
        for integers in (batch.req_pool_indices, batch.out_cache_loc, batch.positions):
            integers.zero_()
        for floats in (self.inputs.q, self.inputs.k, self.inputs.compressed):
            if floats is not None:
                floats.fill_(float("nan"))
        if self.inputs.selection is not None:
            self.inputs.selection.copy_(self._garbage)
        self._describe([], [])
        batch.actual_forward_mode = None

    def fill(self, step: Step, placement: Placement) -> None:
        """The step's rows first, pad rows behind; a step without rows is idle. ValueError where they do not fit."""
        self.fill_idle()
        source, batch, rows = placement.batch, self.inputs.batch, step.q.shape[0]
        if source.batch_size > self._bucket or rows > self._bucket * self._rows:
            raise ValueError(
                f"{source.batch_size} requests with {rows} rows do not fit a graph of {self._bucket} requests of "
                f"{self._rows} rows each; declare a larger bucket"
            )
        if not rows:
            return
        batch.actual_forward_mode = None
        batch.seq_lens[: source.batch_size] = source.seq_lens
        batch.req_pool_indices[: source.batch_size] = source.req_pool_indices
        batch.out_cache_loc[:rows] = source.out_cache_loc
        batch.positions[:rows] = source.positions
        self.inputs.q[:rows] = step.q
        self.inputs.k[:rows] = step.k
        if self.inputs.compressed is not None and step.compressed is not None:
            self.inputs.compressed[:rows] = step.compressed
        if self.inputs.selection is not None and step.selection is not None:
            self.inputs.selection[:rows] = step.selection
        self._describe(list(source.seq_lens_cpu or []), list(source.extend_seq_lens_cpu or []))

    def _describe(self, lengths: list[int], extends: list[int]) -> None:
        """Host copies of the lengths, pad rows included, unless lengths are GPU-only."""
        if not self._on_host:
            return
        batch = self.inputs.batch
        batch.seq_lens_cpu = lengths + [SEQ_LEN_FILL] * (self._bucket - len(lengths))
        if batch.extend_seq_lens is not None:
            batch.extend_seq_lens_cpu = extends + [self._rows] * (self._bucket - len(extends))
