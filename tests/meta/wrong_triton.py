"""The Triton backend with one defect each: faults that users of DSV4 attention have met, in the real kernels.

Each class is sound but for the lines shown, so that a red cell can only be about them. ``module:attr`` loads them:
``dsv4-matrix run --backend wrong_triton:SinkDropped``. Those of verify and drafting: ``wrong_speculation``.
"""

from __future__ import annotations

from typing import Any

import torch
from dsv4_triton import DSV4TritonBackend
from dsv4_triton.store import pack_and_store
from torch import Tensor


class SinkDropped(DSV4TritonBackend):
    """The quantised path forgets the sink."""

    def attend(self, q: Tensor, k_cache: Tensor, indices: Tensor, topk_length: Tensor, attn_sink: Any, *extra: Any):
        return super().attend(q, k_cache, indices, topk_length, None, *extra)


class SinkOfEveryEighthHeadDropped(DSV4TritonBackend):
    """One lane of eight forgets its sink; the others would vouch for it, if it were always the same head's role."""

    first = 6

    def attend(self, q: Tensor, k_cache: Tensor, indices: Tensor, topk_length: Tensor, attn_sink: Any, *extra: Any):
        sink = attn_sink.clone()
        sink[self.first :: 8] = -1e30
        return super().attend(q, k_cache, indices, topk_length, sink, *extra)


class Window127(DSV4TritonBackend):
    """The oldest key of a full window is lost."""

    def attend(self, q: Tensor, k_cache: Tensor, indices: Tensor, topk_length: Tensor, *rest: Any):
        return super().attend(q, k_cache, indices, topk_length.clamp(max=127), *rest)


class FilledMetadata(DSV4TritonBackend):
    """Sound; gives defects a place behind every filling of the metadata, eager or in the graph."""

    def spoil(self, core: Any) -> None:
        raise NotImplementedError

    def init_forward_metadata(self, batch: Any) -> None:
        super().init_forward_metadata(batch)
        self.spoil(self.core_metadata("init_forward_metadata"))

    def init_forward_metadata_in_graph(self, batch: Any) -> None:
        captured = self._captured is not None
        super().init_forward_metadata_in_graph(batch)
        if captured:
            self.spoil(self.core_metadata("init_forward_metadata_in_graph"))


class C4EntryEarly(FilledMetadata):
    """C4 lengths count the group that the row is still in, and the selection offers it."""

    def spoil(self, core: Any) -> None:
        if core.c4_topk_lengths_raw is not None:
            core.c4_topk_lengths_raw.add_(1)
            core.c4_sparse_topk_lengths.copy_(core.c4_topk_lengths_raw.clamp(1, core.index_topk))

    def write_c4_selection(self, raw: Tensor) -> None:
        visible = self.core_metadata("write_c4_selection").c4_topk_lengths_raw.unsqueeze(1)
        column = torch.arange(raw.shape[1], device=raw.device, dtype=raw.dtype)
        super().write_c4_selection(torch.where(column == visible - 1, visible.to(raw.dtype) - 1, raw))


class PageTableRowIgnored(FilledMetadata):
    """Every row translates its compressed entries through the first row's pages."""

    def spoil(self, core: Any) -> None:
        if core.rows and core.c128_page_indices is not None:
            core.page_table.copy_(core.page_table[:1].clone().expand_as(core.page_table))
            first = core.c128_page_indices[:1].clone()
            core.c128_page_indices.copy_(torch.where(core.c128_page_indices >= 0, first, core.c128_page_indices))


class StaleGraphBuffer(DSV4TritonBackend):
    """Replay preparation puts the batch into new tensors; the graph goes on reading the old ones."""

    def init_forward_metadata_out_graph(self, batch: Any, *, in_capture: bool = False) -> None:
        if in_capture:
            super().init_forward_metadata_out_graph(batch, in_capture=True)
            return
        steps = [step for bucket in self.graph_state.steps.values() for step in bucket.values()]
        frozen = [(step.raw, {name: getattr(step.raw, name).clone() for name in NAMES}) for step in steps]
        super().init_forward_metadata_out_graph(batch)
        for raw, values in frozen:
            for name, value in values.items():
                getattr(raw, name).copy_(value)


NAMES = ("req_pool_indices", "seq_lens", "out_cache_loc")


class StaleRowWhenShrinking(DSV4TritonBackend):
    """Replay preparation copies the live requests and leaves the rest as the larger batch before left it."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        state = self.graph_state
        sound = state.prepare_replay

        def prepare_replay(batch: Any) -> Any:
            live = _live_requests(batch)
            steps = [step for bucket in state.steps.values() for step in bucket.values()]
            before = {id(step): {name: getattr(step.raw, name).clone() for name in NAMES} for step in steps}
            step = sound(batch)
            per_request = step.key.rows // step.key.batch_size
            for name, value in before[id(step)].items():
                start = live * per_request if name == "out_cache_loc" else live
                getattr(step.raw, name)[start:].copy_(value[start:])
            return step

        state.prepare_replay = prepare_replay


def _live_requests(batch: Any) -> int:
    if batch.actual_forward_mode == "idle":
        return 0
    return int((batch.req_pool_indices != 0).sum())


class OutCacheLocReusedWhileIdle(DSV4TritonBackend):
    """The write locations are translated once, and an idle rank goes on using them."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        state = self.graph_state
        sound = state.prepare_replay

        def prepare_replay(batch: Any) -> Any:
            if batch.actual_forward_mode != "idle" and _live_requests(batch):
                return sound(batch)
            kept = {id(s): s.raw.out_cache_loc.clone() for b in state.steps.values() for s in b.values()}
            step = sound(batch)
            step.raw.out_cache_loc.copy_(kept[id(step)])
            return step

        state.prepare_replay = prepare_replay


class PadRowWritesLiveSlot(DSV4TritonBackend):
    """A pad row's location 0 is taken for the last slot of the pool's first live page."""

    def store_kv(self, batch: Any, k: Tensor) -> None:
        slots = self.get_swa_out_cache_loc(batch)
        pack_and_store(k, torch.where(slots <= 0, self.runner.swa_page_size, slots), self.cache.swa)


class LengthsNotHonoured(DSV4TritonBackend):
    """The window's length is forced to its width, so that padding of the index list is read as slot 0."""

    def attend(self, q: Tensor, k_cache: Tensor, indices: Tensor, topk_length: Tensor, *rest: Any):
        return super().attend(q, k_cache, indices.clamp(min=0), torch.full_like(topk_length, 128), *rest)


class LengthsIgnored(DSV4TritonBackend):
    """A key counts where its index is not -1; the lengths of both lists are not looked at."""

    def attend(self, q: Tensor, k_cache: Tensor, indices: Tensor, topk_length: Tensor, attn_sink: Any, *extra: Any):
        widths = [torch.full_like(topk_length, found.shape[-1]) for found in (indices, *extra[1:2])]
        return super().attend(q, k_cache, indices, widths[0], attn_sink, *extra[:2], *widths[1:])


class ExtraLengthIgnored(DSV4TritonBackend):
    """The same of the compressed entries alone."""

    def attend(self, q, k_cache, indices, topk_length, attn_sink, *extra):
        width = [torch.full_like(topk_length, found.shape[-1]) for found in extra[1:2]]
        return super().attend(q, k_cache, indices, topk_length, attn_sink, *extra[:2], *width)


class PrefillLengthIgnored(DSV4TritonBackend):
    """The same of the sparse prefill's combined list."""

    def attend_prefill(self, q, kv, indices, topk_length, attn_sink):
        width = torch.full_like(topk_length, indices.shape[-1])
        return super().attend_prefill(q, kv, indices, width, attn_sink)


class EntriesAsLongAsTheWindow(DSV4TritonBackend):
    """The list of compressed entries is given the length of the window's list."""

    def attend(self, q, k_cache, indices, topk_length, attn_sink, *extra):
        return super().attend(
            q, k_cache, indices, topk_length, attn_sink, *extra[:2], *(topk_length,) * (len(extra) > 2)
        )


class LseInBase2(DSV4TritonBackend):
    """The log-sum-exp leaves the kernel in its own base."""

    def attend(self, *arguments: Any):
        out, lse = super().attend(*arguments)
        return out, lse * 1.4426950408889634


class EmptyExtraEntryCounted(DSV4TritonBackend):
    """A row without a complete entry attends to slot 0, whose index was clamped from -1."""

    def attend(self, q: Tensor, k_cache: Tensor, indices: Tensor, topk_length: Tensor, sink: Any, *extra: Any):
        if extra:
            cache, entries, length = extra
            extra = (cache, entries.clamp(min=0), length)
        return super().attend(q, k_cache, indices, topk_length, sink, *extra)


class SlotMapCached(DSV4TritonBackend):
    """The full to SWA map is copied when the backend is built and never looked at again."""

    def __init__(self, runner: Any, cache: Any = None) -> None:
        from dataclasses import replace

        super().__init__(replace(runner, full_to_swa_index_mapping=runner.full_to_swa_index_mapping.clone()), cache)


class OwnTokenUnseen(DSV4TritonBackend):
    """The window ends before the row itself."""

    def attend(self, q: Tensor, k_cache: Tensor, indices: Tensor, topk_length: Tensor, *rest: Any):
        return super().attend(q, k_cache, indices.roll(-1, -1), topk_length - 1, *rest)


class QueryStrideAssumed(DSV4TritonBackend):
    """Heads of a query are taken to lie 512 elements apart."""

    def attend(self, q: Tensor, *rest: Any):
        packed = q.as_strided(q.shape, torch.empty(q.shape, device="meta").stride(), q.storage_offset())
        return super().attend(packed, *rest)


class EntriesInWindowLeftOut(FilledMetadata):
    """Compressed entries are attended only where the window does not reach."""

    def spoil(self, core: Any) -> None:
        if core.c4_topk_lengths_raw is not None:
            core.c4_topk_lengths_raw.copy_((core.seq_lens_casual - 128).clamp(min=0) // 4)
            core.c4_sparse_topk_lengths.copy_(core.c4_topk_lengths_raw.clamp(1, core.index_topk))


class LengthFrozenAtCapture(DSV4TritonBackend):
    """The longest request at capture bounds what replays read."""

    def init_forward_metadata_out_graph(self, batch: Any, *, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture=in_capture)
        if in_capture:
            self._longest = max(batch.seq_lens_cpu)

    def attend(self, q: Tensor, k_cache: Tensor, indices: Tensor, topk_length: Tensor, *rest: Any):
        longest = self._longest if self.has_static_inputs else 128
        return super().attend(q, k_cache, indices, topk_length.clamp(max=longest), *rest)


class SelectionOfTheWarmUp(DSV4TritonBackend):
    """The graph reads a copy of the selection that was made before the capture."""

    _first: Tensor | None = None

    def write_c4_selection(self, raw: Tensor) -> None:
        if self._first is None:
            self._first = raw.clone()
        super().write_c4_selection(self._first if self.has_static_inputs else raw)
