# ruff: noqa: N803 - constexpr names are upper case
"""Metadata on the device: all fields of a forward in one kernel launch, and the C4 selection in another.

Tiling: a program fills ``ROWS`` rows and ``COLUMNS`` columns of the wide index tensors (half as many page-table
columns, since a page holds two C128 entries); programs of column block 0 also write the per-row fields and windows.
Each program expands its own rows: a multiply for uniform batches, else a running sum over the requests' row counts,
so there is no scan kernel before it and nothing for the host to wait for. Loops are ``while`` loops: a ``range`` with
a loaded bound fails in the interpreter of triton 3.6 with numpy 2.4.
Only table entries at positions that the row's own request holds are read, and each is bounds-checked before use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from dsv4_triton.geometry import PAGE_SIZE, WINDOW
from dsv4_triton.metadata import allocate
from dsv4_triton.numerics import INTERPRETED

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4_triton.metadata import DSV4AttnMetadata
    from dsv4_triton.rows import RowLayout

#: A row of an index tensor is at least 512 wide, so one column block serves contexts up to 65,536 tokens.
COLUMNS = 512
NUM_WARPS = 4

C4_PER_PAGE = PAGE_SIZE // 4


@triton.jit
def _expand_rows(t, lens, bs, rows_per_request, RAGGED: tl.constexpr, BLOCK: tl.constexpr):
    """Request of each row and index of its first row, both int32 like ``t``; request ``bs`` for pad rows."""
    if RAGGED:
        request = tl.zeros_like(t)
        start = tl.zeros_like(t)
        carry = tl.full((), 0, tl.int32)
        first = tl.full((), 0, tl.int32)
        while first < bs:
            r = first + tl.arange(0, BLOCK)
            count = tl.load(lens + r, mask=r < bs, other=0).to(tl.int32)
            end = carry + tl.cumsum(count, 0)
            before = (end[None, :] <= t[:, None]) & (r < bs)[None, :]
            request += tl.sum(before.to(tl.int32), 1)
            start += tl.sum(tl.where(before, count[None, :], 0), 1)
            carry += tl.sum(count, 0)
            first += BLOCK
    else:
        request = t // rows_per_request
        start = request * rows_per_request
    return request, start


@triton.jit(
    do_not_specialize=[
        "bs", "rows", "rows_per_request", "out_rows", "out_stride", "table_rows", "context", "mapping_size",
        "pages", "index_topk", "c4_width", "c128_width", "counted",
    ]
)  # fmt: skip
def _metadata_kernel(
    seq_lens, req_pool_indices, lens, out_cache_loc, req_to_token, mapping,
    page_table, raw_out_loc, seq_lens_casual, positions_casual, swa_page_indices, swa_topk_lengths, swa_out_cache_loc,
    c4_out_loc, c128_out_loc, c4_raw, c4_clamp1, c4_sparse_lengths, c4_sparse, c128_clamp1, c128,
    bs, rows, rows_per_request, out_rows, out_stride, table_rows, table_stride, context, mapping_size,
    pages, index_topk, c4_width, c128_width, counted,
    RAGGED: tl.constexpr, COMPRESS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = t < rows
    request, start = _expand_rows(t, lens, bs, rows_per_request, RAGGED, 128)
    live = inside & (request < bs)
    request = tl.minimum(request, tl.maximum(bs - 1, 0))
    # False for all rows of an empty batch. Not ``bs > 0``: interpreted, that is a Python bool, and triton 3.9 turns a
    # mask that it is and-ed with into integers, which it then refuses.
    known = inside & (request < bs)
    seq_len = tl.load(seq_lens + request, mask=known, other=0).to(tl.int32)
    count = rows_per_request
    if RAGGED:
        count = tl.load(lens + request, mask=known, other=0).to(tl.int32)
    first = seq_len - count * counted
    visible = tl.where(live, first + (t - start) + 1, 1)
    total = tl.where(live, first + count, 1)
    position = visible - 1

    pool_row = tl.load(req_pool_indices + request, mask=known, other=-1).to(tl.int64)
    known = known & (pool_row >= 0) & (pool_row < table_rows)
    table = req_to_token + tl.where(known, pool_row, 0) * table_stride
    t64 = t.to(tl.int64)
    c128_count = tl.maximum(visible, 0) // 128

    column = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    block_at = column * 256
    held = known[:, None] & (block_at[None, :] < tl.minimum(total, context)[:, None])
    loc = tl.load(table[:, None] + block_at[None, :], mask=held, other=0)
    at = t64[:, None] * pages + column[None, :]
    tl.store(page_table + at, tl.maximum(loc, 0) // 256, mask=inside[:, None] & (column < pages)[None, :])

    if COMPRESS:
        entry = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        block_at = (entry // 2) * 256
        held = known[:, None] & (entry[None, :] < c128_count[:, None]) & (block_at < context)[None, :]
        loc = tl.load(table[:, None] + block_at[None, :], mask=held, other=-1)
        slot = tl.where(held & (loc >= 0), (tl.maximum(loc, 0) // 256) * 2 + (entry % 2)[None, :], -1)
        at = t64[:, None] * c128_width + entry[None, :]
        tl.store(c128 + at, slot, mask=inside[:, None] & (entry < c128_width)[None, :])
        at = t64[:, None] * c4_width + entry[None, :]
        none = tl.full((ROWS, COLUMNS), -1, tl.int32)
        tl.store(c4_sparse + at, none, mask=inside[:, None] & (entry < c4_width)[None, :])

    if tl.program_id(1) == 0:
        out_loc = tl.load(out_cache_loc + t64 * out_stride, mask=inside & (t < out_rows), other=0).to(tl.int64)
        real = inside & (out_loc > 0)
        mapped = real & (out_loc < mapping_size)
        swa_out = tl.load(mapping + tl.where(mapped, out_loc, 0), mask=mapped, other=0).to(tl.int32)
        tl.store(raw_out_loc + t, out_loc, mask=inside)
        tl.store(swa_out_cache_loc + t, swa_out, mask=inside)
        tl.store(seq_lens_casual + t, visible, mask=inside)
        tl.store(positions_casual + t, position, mask=inside)
        tl.store(swa_topk_lengths + t, tl.minimum(visible, WINDOW), mask=inside)

        back = tl.arange(0, WINDOW)
        key_at = position[:, None] - back[None, :]
        key_held = known[:, None] & (key_at >= 0) & (key_at < context)
        key_loc = tl.load(table[:, None] + key_at, mask=key_held, other=-1)
        key_held = key_held & (key_loc >= 0) & (key_loc < mapping_size)
        key_slot = tl.load(mapping + tl.where(key_held, key_loc, 0), mask=key_held, other=-1).to(tl.int32)
        tl.store(swa_page_indices + t64[:, None] * WINDOW + back[None, :], key_slot, mask=inside[:, None])

        if COMPRESS:
            emits = real & (visible > 0)
            written = tl.maximum(out_loc, 0)
            c4_count = tl.maximum(visible, 0) // 4
            tl.store(c4_out_loc + t, tl.where(emits & (visible % 4 == 0), written // 4, -1).to(tl.int32), mask=inside)
            tl.store(
                c128_out_loc + t, tl.where(emits & (visible % 128 == 0), written // 128, -1).to(tl.int32), mask=inside
            )
            tl.store(c4_raw + t, c4_count, mask=inside)
            tl.store(c4_clamp1 + t, tl.maximum(c4_count, 1), mask=inside)
            tl.store(c4_sparse_lengths + t, tl.minimum(tl.maximum(c4_count, 1), index_topk), mask=inside)
            tl.store(c128_clamp1 + t, tl.maximum(c128_count, 1), mask=inside)


def rows_per_program(rows: int) -> int:
    """Rows of a block: few on a GPU, one specialisation. The interpreter pays for programs first, elements second."""
    return min(64, triton.next_power_of_2(rows)) if INTERPRETED.value else 4


def page_columns(max_seq_len: int) -> int:
    """Page-table columns for sequences of up to ``max_seq_len`` tokens."""
    return -(-max_seq_len // PAGE_SIZE)


def build_attn_metadata(layout: RowLayout, req_to_token: Tensor, mapping: Tensor, index_topk: int) -> DSV4AttnMetadata:
    """Freshly allocated metadata of ``layout``, filled."""
    core = allocate(
        layout.rows,
        page_columns(layout.max_seq_len),
        index_topk,
        req_to_token.device,
        compress=layout.compress,
        prefill=layout.prefill,
    )
    fill_attn_metadata(core, layout, req_to_token, mapping)
    return core


def fill_attn_metadata(core: DSV4AttnMetadata, layout: RowLayout, req_to_token: Tensor, mapping: Tensor) -> None:
    """Write every tensor field of ``core`` in place, ``c4_sparse_page_indices`` to -1: one launch, no host sync.

    ``core`` has ``layout.rows`` contiguous rows. What is read is read from the layout's tensors, ``req_to_token``
    int32 ``[requests, context]`` and ``mapping`` int64 ``[locations]`` at the time the launch executes, so that a
    captured launch follows all of them. ``c4_sparse_raw_indices`` is left to ``write_c4_selection``.
    """
    if layout.rows == 0:
        return
    requests = layout.seq_lens.contiguous()
    ragged = layout.lens is not None
    lens = layout.lens.contiguous() if layout.lens is not None else requests
    pages = core.page_table.shape[1]
    compress = core.c4_sparse_page_indices is not None
    # an absent field is never written, but a launch needs a pointer for it
    spare = core.seq_lens_casual

    def or_spare(tensor: Tensor | None) -> Tensor:
        return spare if tensor is None else tensor

    c4_width = or_spare(core.c4_sparse_page_indices).shape[-1] if compress else 0
    c128_width = or_spare(core.c128_page_indices).shape[-1] if compress else 0
    block = rows_per_program(layout.rows)
    grid = (triton.cdiv(layout.rows, block), triton.cdiv(max(2 * pages, c4_width, c128_width), COLUMNS))
    _metadata_kernel[grid](
        requests, layout.req_pool_indices.contiguous(), lens, layout.out_cache_loc, req_to_token, mapping,
        core.page_table, core.raw_out_loc, core.seq_lens_casual, core.positions_casual, core.swa_page_indices,
        core.swa_topk_lengths, or_spare(core.swa_out_cache_loc),
        or_spare(core.c4_out_loc), or_spare(core.c128_out_loc), or_spare(core.c4_topk_lengths_raw),
        or_spare(core.c4_topk_lengths_clamp1), or_spare(core.c4_sparse_topk_lengths),
        or_spare(core.c4_sparse_page_indices), or_spare(core.c128_topk_lengths_clamp1),
        or_spare(core.c128_page_indices),
        layout.batch_size, layout.rows, layout.rows_per_request, layout.out_cache_loc.shape[0],
        layout.out_cache_loc.stride(0), req_to_token.shape[0], req_to_token.stride(0), req_to_token.shape[1],
        mapping.shape[0], pages, core.index_topk, c4_width, c128_width, int(layout.counted),
        RAGGED=ragged, COMPRESS=compress, ROWS=block, COLUMNS=COLUMNS, WINDOW=WINDOW,
        num_warps=NUM_WARPS, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "index_topk", "width", "pages"])
def _c4_selection_kernel(
    raw, raw_stride, lengths, page_table, slots, kept, rows, index_topk, width, pages,
    KEEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PER_PAGE: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (t < rows)[:, None] & (column < index_topk)[None, :]
    entry = tl.load(raw + t[:, None] * raw_stride + column[None, :], mask=inside, other=-1)
    count = tl.load(lengths + t, mask=t < rows, other=0)
    valid = inside & (entry >= 0) & (entry < count[:, None]) & (entry < pages * PER_PAGE)
    entry = tl.where(valid, entry, 0)
    page = tl.load(page_table + t[:, None] * pages + entry // PER_PAGE, mask=valid, other=0)
    slot = tl.where(valid, page * PER_PAGE + entry % PER_PAGE, -1)
    tl.store(slots + t[:, None] * width + column[None, :], slot, mask=inside)
    if KEEP:
        tl.store(kept + t[:, None] * width + column[None, :], tl.where(valid, entry, -1), mask=inside)


def write_c4_selection(core: DSV4AttnMetadata, raw: Tensor) -> None:
    """Translate the indexer's choice into C4 slots, column by column.

    ``raw`` int32 ``[T', index_topk]``, any row stride, holds request-local entry ids. An id outside
    ``[0, (p + 1) // 4)`` becomes -1. Rows beyond the shorter of ``raw`` and the metadata are left at -1. Under EXTEND
    the accepted ids are kept in ``c4_sparse_raw_indices`` too, so that both paths attend the same set.
    """
    slots, lengths, kept = core.c4_sparse_page_indices, core.c4_topk_lengths_raw, core.c4_sparse_raw_indices
    if slots is None or lengths is None:
        raise AssertionError("write_c4_selection: the metadata has no C4 fields")
    if kept is not None and raw.shape[0] < core.rows:
        kept[raw.shape[0] :].fill_(-1)
    rows = min(raw.shape[0], core.rows)
    if rows == 0:
        return
    block = rows_per_program(rows)
    grid = (triton.cdiv(rows, block), triton.cdiv(core.index_topk, COLUMNS))
    _c4_selection_kernel[grid](
        raw, raw.stride(0), lengths, core.page_table, slots, slots if kept is None else kept,
        rows, core.index_topk, slots.shape[1], core.page_table.shape[1],
        KEEP=kept is not None, ROWS=block, COLUMNS=COLUMNS, PER_PAGE=C4_PER_PAGE,
        num_warps=NUM_WARPS, enable_fp_fusion=True,
    )  # fmt: skip


def swa_slots(mapping: Tensor, out_cache_loc: Tensor) -> Tensor:
    """int32 SWA slots of full locations; the dummy location's slot for those that are negative or out of range."""
    known = (out_cache_loc > 0) & (out_cache_loc < mapping.shape[0])
    # a product instead of torch.where with a scalar, which copies that scalar to the device and waits for it
    return mapping[out_cache_loc * known].to(torch.int32)
