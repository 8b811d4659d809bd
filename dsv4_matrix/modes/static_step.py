"""The static buffers of a captured step: one ForwardBatch and its inputs, filled in place before every replay."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dsv4_matrix.cases.build import laid_out_query
from dsv4_matrix.cases.poison import garbage_selection
from dsv4_matrix.cases.scenario import Placement, Step
from dsv4_matrix.modes.padding import REQUEST_FIELDS, ROW_FIELDS, SEQ_LEN_FILL, PadSpec, pad
from dsv4_matrix.modes.step import StepInputs
from dsv4_matrix.protocol import ForwardBatch, ForwardMode


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
        nobody = torch.empty(0, dtype=torch.int64, device=self.inputs.q.device)
        batch = replace(
            self.inputs.batch,
            req_pool_indices=nobody,
            seq_lens=nobody,
            out_cache_loc=nobody,
            positions=nobody,
            extend_seq_lens=None if self.inputs.batch.extend_seq_lens is None else nobody,
            seq_lens_cpu=[] if self._on_host else None,
            extend_seq_lens_cpu=[] if self._on_host and self.inputs.batch.extend_seq_lens is not None else None,
        )
        self._take(batch, 0)
        self.inputs.batch.actual_forward_mode = None

    def fill(self, step: Step, placement: Placement) -> None:
        """The step's rows first, pad rows behind; a step without rows is idle. ValueError where they do not fit."""
        rows = step.q.shape[0]
        if not rows:
            self.fill_idle()
            return
        self._take(placement.batch, placement.batch.batch_size)
        self.inputs.batch.actual_forward_mode = None
        given = ((self.inputs.q, step.q), (self.inputs.k, step.k), (self.inputs.compressed, step.compressed))
        for buffer, values in (*given, (self.inputs.selection, step.selection)):
            if buffer is not None and values is not None:
                buffer[:rows] = values

    def _take(self, source: ForwardBatch, requests: int) -> None:
        """``source`` padded into the static batch, and every row of the other inputs a pad row's."""
        batch = self.inputs.batch
        padded = pad(source, PadSpec(requests, self._bucket, self._rows))
        for name in (*REQUEST_FIELDS, *ROW_FIELDS):
            if (buffer := getattr(batch, name)) is not None:
                buffer.copy_(getattr(padded, name))
        batch.seq_lens_cpu, batch.extend_seq_lens_cpu = padded.seq_lens_cpu, padded.extend_seq_lens_cpu
        for floats in (self.inputs.q, self.inputs.k, self.inputs.compressed):
            if floats is not None:
                floats.fill_(float("nan"))
        if self.inputs.selection is not None:
            self.inputs.selection.copy_(self._garbage)
