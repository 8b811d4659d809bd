"""What each row attends and where it stores, made from the batch and the tables: eagerly, or again in a graph."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .pools import ToyPools

WINDOW = 128


@dataclass
class Metadata:
    """Row metadata of one batch; every field int64 on the device."""

    table_row: Tensor  # [T]
    lens: Tensor  # [T]
    swa: Tensor  # [T, W]
    out_loc: Tensor  # [T] full
    swa_out: Tensor  # [T]
    c4_out: Tensor
    c128_out: Tensor
    c4: Tensor  # [T, topk]
    c128: Tensor  # [T, E]


class ToyMetadata(ToyPools):
    """The metadata of one backend, and what a graph of it keeps."""

    def __init__(self, runner: Any, pools: dict[str, Tensor] | None) -> None:
        super().__init__(runner, pools)
        self.meta: Metadata | None = None
        self._static: Metadata | None = None
        self._cached_out: Tensor | None = None
        self._max_bs = 0

    def init_forward_metadata(self, batch: Any) -> None:
        if batch.forward_mode not in ("extend", "decode", "target_verify", "draft_extend", "idle"):
            self._refuse(NotImplementedError, f"unsupported forward_mode={batch.forward_mode}")
        bs, locations = batch.batch_size, len(batch.out_cache_loc)
        if batch.forward_mode == "decode" and locations != bs:
            self._refuse(AssertionError, f"decode has {bs} requests and {locations} locations")
        self.meta = self._metadata(batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._max_bs = max_bs

    def init_forward_metadata_out_graph(self, batch: Any, *, in_capture: bool = False) -> None:
        if batch.forward_mode not in ("decode", "idle", "target_verify", "draft_extend"):
            self._refuse(NotImplementedError, f"unsupported forward_mode={batch.forward_mode}: no graph bucket")
            return
        if batch.batch_size > self._max_bs:
            self._refuse(AssertionError, f"batch of {batch.batch_size} beyond the captured {self._max_bs}")
            return
        longest, context = max(batch.seq_lens_cpu or [0]), self.runner.req_to_token.shape[1]
        if longest > context:
            self._refuse(AssertionError, f"a request of {longest} tokens; the table has {context}")
            return
        if self.has("stale_graph_buffer"):
            self._static = self._metadata(batch)
        if self.has("stale_row_when_shrinking"):
            fresh = self._metadata(batch)
            if self._static is None:
                self._static = fresh
            live = int((batch.out_cache_loc > 0).sum())
            for item in fields(Metadata):
                getattr(self._static, item.name)[:live] = getattr(fresh, item.name)[:live]
        if self.has("out_loc_cached_while_idle") and (in_capture or batch.actual_forward_mode != "idle"):
            fresh_out = self._slots(batch.out_cache_loc)
            self._cached_out = fresh_out if self._cached_out is None else self._cached_out.copy_(fresh_out)

    def init_forward_metadata_in_graph(self, batch: Any) -> None:
        if self.has("host_sync_in_graph"):
            batch.seq_lens.max().item()
        if self.has("host_sync_swallowed"):
            with contextlib.suppress(Exception):
                batch.seq_lens.tolist()
        self.meta = self._static if self._static is not None else self._metadata(batch)
        if self._cached_out is not None:
            self.meta.swa_out = self._cached_out
        if self.has("length_frozen_in_graph"):
            longest = max(batch.seq_lens_cpu or [1])
            self.meta.swa = torch.where(self._arange(self.meta.swa.shape[1]) < longest, self.meta.swa, -1)

    def on_after_cuda_graph_warmup(self) -> None:
        pass

    def _rows(self, batch: Any) -> tuple[Tensor, Tensor]:
        mode, total = batch.forward_mode, batch.out_cache_loc.shape[0]
        if mode in ("decode", "idle"):
            return batch.req_pool_indices, batch.seq_lens
        if mode == "target_verify":
            counts = batch.verify_lens
            if counts is None:
                counts = torch.full_like(batch.seq_lens, batch.draft_token_num)
            first = batch.seq_lens
        else:
            counts = batch.extend_seq_lens
            first = batch.seq_lens - counts
            if self.has("extend_rows_from_prefix") and mode == "draft_extend":
                first = batch.seq_lens
        request = torch.repeat_interleave(self._arange(len(counts)), counts, output_size=total)
        offset = self._arange(total) - (counts.cumsum(0) - counts)[request]
        if self.has("verify_rows_share_first_length") and mode == "target_verify":
            offset = torch.zeros_like(offset)
        return batch.req_pool_indices[request], first[request] + offset + 1

    def _metadata(self, batch: Any) -> Metadata:
        table = self._table()
        context = table.shape[1]
        row, lens = self._rows(batch)
        if self.has("page_row_ignored") and len(row):
            row = row[:1].expand_as(row)
        window = WINDOW - 1 if self.has("window127") else WINDOW + 1 if self.has("window129") else WINDOW
        if self.has("sparse_window127") and batch.forward_mode == "extend" and self.runner.prefill_path == "sparse":
            window = WINDOW - 1
        newest = lens if self.has("window_in_future") else lens - 1
        position = newest[:, None] - self._arange(window)
        location = table[row[:, None], position.clamp(0, context - 1)]
        swa = torch.where(position >= 0, self._slots(location), -1)
        out = batch.out_cache_loc
        swa_out = self._slots(out)
        if self.has("pad_writes_live_slot") and len(out):
            swa_out = torch.where(out > 0, swa_out, swa[0, 1:2].clamp(min=0))

        def emitted(ratio: int) -> Tensor:
            real = (out > 0) & (lens > 0) & (lens % ratio == 0)
            shift = 1 if self.has("rejected_entry_visible") else 0
            return torch.where(real, out // ratio + shift, -1)

        entry = self._arange(context // 128)
        complete = self._complete(lens, 128)
        c128_loc = table[row[:, None], (entry * 128 + 127)[None, :]]
        return Metadata(
            table_row=row,
            lens=lens,
            swa=swa,
            out_loc=out,
            swa_out=swa_out,
            c4_out=emitted(4),
            c128_out=emitted(128),
            c4=torch.full((len(lens), self.runner.index_topk), -1, device=lens.device),
            c128=torch.where(entry[None, :] < complete[:, None], c128_loc // 128, -1),
        )

    def _complete(self, lens: Tensor, ratio: int) -> Tensor:
        count = lens.clamp(min=0) // ratio
        return count + self.has("entry_early") - (1 if self.has("entry_late") else 0)

    def _ready(self) -> Metadata:
        assert self.meta is not None, "forward before init_forward_metadata"
        return self.meta
