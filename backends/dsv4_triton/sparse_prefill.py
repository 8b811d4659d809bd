# ruff: noqa: N803 - constexpr names are upper case
"""The sparse-prefill path of EXTEND: dequantise what a chunk can see once, then attend over one bf16 workspace.

Workspace rows: the compressed entries of each request (``c_max`` each, request after request), then each request's
window tokens in ascending position, from the first that its first row sees to its last. Every row of the batch gets
one index list over it. Extents come from host lengths where there are any; without them from upper bounds known on
the host (rows, and the width of the page table), so that GPU-only lengths cause no synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from dsv4_triton.geometry import HEAD_DIM, PAGE_SIZE, WINDOW
from dsv4_triton.metadata import padded
from dsv4_triton.metadata_kernels import COLUMNS, NUM_WARPS, rows_per_program, swa_slots
from dsv4_triton.runner import EXTEND, is_idle

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4_triton.metadata import DSV4AttnMetadata
    from dsv4_triton.rows import RowLayout
    from dsv4_triton.runner import ForwardBatch

#: EXTEND batches with more rows than this take the sparse path when it is chosen automatically.
BIG_QUERY_ROWS = 11673
#: Widths of combined index lists are multiples of this.
PREFILL_INDEX_PAD = 128


def takes_sparse_path(batch: ForwardBatch, rows: int, prefill_path: str) -> bool:
    """Whether a forward of ``rows`` query rows goes through the workspace; only EXTEND ever does."""
    if batch.forward_mode != EXTEND or is_idle(batch) or prefill_path == "dense" or rows == 0:
        return False
    return prefill_path == "sparse" or rows > BIG_QUERY_ROWS


class SparsePrefillWorkspace:
    """A growing bf16 ``[N, 1, 512]`` buffer, shared by layers and forwards; it never shrinks."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = device
        self.buffer: Tensor | None = None

    def get(self, rows: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The first ``rows`` rows, contents undefined. AssertionError for no rows; reallocates to grow or for dtype."""
        if rows <= 0:
            raise AssertionError(f"SparsePrefillWorkspace.get: got {rows} rows; expected at least 1")
        if self.buffer is None or self.buffer.shape[0] < rows or self.buffer.dtype != dtype:
            self.buffer = torch.empty(rows, 1, HEAD_DIM, dtype=dtype, device=self.device)
        return self.buffer[:rows]


@dataclass(frozen=True)
class CompressedRegion:
    """The compressed half of the workspace for one ratio.

    ``slots`` ``[bs * c_max]`` into the compressed pool; ``base`` int32 ``[bs]``, first workspace row of each request.
    """

    slots: Tensor
    base: Tensor
    c_max: int


@dataclass
class SparsePrefillCache:
    """What all layers of one forward share.

    Attributes:
        request: int64 ``[T]``, request of each row, the last one's for pad rows.
        last_rows: int64 ``[bs]``, last row of each request.
        query_start_loc: int32 ``[bs + 1]``.
        first_positions: int32 ``[bs]``, first position gathered: seq_len - min(seq_len, extend + 127).
        swa_offsets: int32 ``[bs + 1]``, exclusive sums of the gathered lengths.
        swa_token_ids: int32 ``[window rows]``, SWA slot of each gathered token.
        max_seq_len: host bound of the batch's lengths.
    """

    request: Tensor
    last_rows: Tensor
    query_start_loc: Tensor
    first_positions: Tensor
    swa_offsets: Tensor
    swa_token_ids: Tensor
    max_seq_len: int
    regions: dict[int, CompressedRegion] = field(default_factory=dict)
    #: combined indices and lengths of ratios whose raw ids are fixed (0 and 128); those of ratio 4 are a layer's own
    lists: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


def build_cache(layout: RowLayout, batch: ForwardBatch, req_to_token: Tensor, mapping: Tensor) -> SparsePrefillCache:
    """Gather lists of an EXTEND batch. No host sync: without host lengths the gather is sized by its bound."""
    if layout.lens is None:
        raise AssertionError("sparse prefill: the batch has no extend_seq_lens; expected int64 [bs]")
    device = req_to_token.device
    bs, rows = layout.batch_size, layout.rows
    seq_lens, extends = layout.seq_lens.long(), layout.lens.long()
    gathered = torch.minimum(seq_lens, extends + (WINDOW - 1))
    first = seq_lens - gathered
    query_start = _exclusive_sum(extends)
    offsets = _exclusive_sum(gathered)
    total = _gathered_rows(batch, rows, bs)

    at = torch.arange(total, device=device)
    owner = torch.searchsorted(offsets[1:], at, right=True).clamp(max=bs - 1)
    position = (first[owner] + at - offsets[owner]).clamp(min=0, max=req_to_token.shape[1] - 1)
    loc = req_to_token[layout.req_pool_indices[owner].long(), position]
    # rows beyond the true total exist only when it is not known on the host; they read the dummy slot
    loc = loc * (at < offsets[-1])

    row = torch.arange(rows, device=device)
    return SparsePrefillCache(
        request=torch.searchsorted(query_start[1:], row, right=True).clamp(max=bs - 1),
        last_rows=(query_start[1:] - 1).clamp(min=0, max=rows - 1),
        query_start_loc=query_start.int(),
        first_positions=first.int(),
        swa_offsets=offsets.int(),
        swa_token_ids=swa_slots(mapping, loc),
        max_seq_len=layout.max_seq_len,
    )


def c4_region(page_table: Tensor, request_rows: Tensor, max_seq_len: int) -> CompressedRegion:
    """C4 slots of each request, from the page table of one of its rows: ``max(max_seq_len // 4, 1)`` a request.

    ``page_table`` int32 ``[T, pages]``, ``request_rows`` int64 ``[bs]``. AssertionError if the page table is narrower
    than that.
    """
    per_page = PAGE_SIZE // 4
    c_max = _extent(max_seq_len, 4, page_table.shape[1] * per_page)
    entry = torch.arange(c_max, device=page_table.device)
    slots = page_table[request_rows][:, entry // per_page] * per_page + entry % per_page
    return _region(slots, c_max)


def c128_region(c128_page_indices: Tensor, last_rows: Tensor, max_seq_len: int) -> CompressedRegion:
    """C128 slots of each request, from the list of its last row, which sees the most."""
    c_max = _extent(max_seq_len, 128, c128_page_indices.shape[1])
    return _region(c128_page_indices[last_rows][:, :c_max], c_max)


def _region(slots: Tensor, c_max: int) -> CompressedRegion:
    bs = slots.shape[0]
    base = torch.arange(bs, device=slots.device, dtype=torch.int32) * c_max
    return CompressedRegion(slots.clamp(min=0).reshape(-1).contiguous(), base, c_max)


def _extent(max_seq_len: int, ratio: int, capacity: int) -> int:
    c_max = max(max_seq_len // ratio, 1)
    if c_max > capacity:
        raise AssertionError(
            f"sparse prefill: {max_seq_len} tokens have {c_max} entries of ratio {ratio}, more than the {capacity} "
            "that the metadata lists; rebuild the metadata for these lengths"
        )
    return c_max


def _exclusive_sum(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _gathered_rows(batch: ForwardBatch, rows: int, bs: int) -> int:
    """Window rows of the workspace, known on the host: exact with host lengths, else their upper bound."""
    seq_lens, extends = batch.seq_lens_cpu, batch.extend_seq_lens_cpu
    if seq_lens is None or extends is None:
        return rows + (WINDOW - 1) * bs
    return max(sum(min(int(s), int(e) + WINDOW - 1) for s, e in zip(seq_lens, extends, strict=True)), 1)


@triton.jit(do_not_specialize=["rows", "topk", "ratio", "swa_start", "width"])
def _combine_kernel(
    positions, request, compressed_base, swa_offsets, first_positions, raw, raw_stride, out, out_lengths,
    rows, topk, ratio, swa_start, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = t < rows
    r = tl.load(request + t, mask=inside, other=0)
    visible = tl.load(positions + t, mask=inside, other=0) + 1
    first = tl.load(first_positions + r, mask=inside, other=0)
    count = tl.minimum(visible // tl.maximum(ratio, 1), topk)
    window = tl.minimum(visible, WINDOW)
    # a pad row's position 0 may lie before what its request gathered; such a row reads nothing
    window_first = visible - window - first
    swa_base = tl.load(swa_offsets + r, mask=inside, other=0) + swa_start

    compressed = column[None, :] < count[:, None]
    at = raw + t[:, None] * raw_stride + column[None, :]
    entry = tl.load(at, mask=compressed & inside[:, None], other=-1)
    base = tl.load(compressed_base + r, mask=inside, other=0)
    entry = tl.where(entry >= 0, entry + base[:, None], -1)
    ahead = column[None, :] - count[:, None]
    token = (swa_base + window_first)[:, None] + ahead
    in_window = (ahead >= 0) & (ahead < window[:, None]) & (window_first >= 0)[:, None]
    index = tl.where(compressed, entry, tl.where(in_window, token, -1))
    tl.store(out + t[:, None] * width + column[None, :], index, mask=inside[:, None] & (column < width)[None, :])
    if tl.program_id(1) == 0:
        tl.store(out_lengths + t, count + window, mask=inside)


def combine_topk_swa_indices(
    core: DSV4AttnMetadata,
    cache: SparsePrefillCache,
    *,
    ratio: int,
    topk: int,
    topk_indices: Tensor,
    compressed_base: Tensor,
    swa_start: int,
) -> tuple[Tensor, Tensor]:
    """One index list a row: ``min((p + 1) // ratio, topk)`` compressed entries, then the window ascending, then -1.

    ``topk_indices`` int32 ``[T, >= topk]``, any row stride, are request-local entry ids, -1 where absent.
    ``compressed_base`` int32 ``[bs]`` and ``swa_start`` place both halves in the workspace. Ratio 0 has topk 0.
    Returns indices int32 ``[T, topk + 128 padded to 128]`` and lengths int32 ``[T]``.
    """
    rows = core.rows
    width = padded(topk + WINDOW, PREFILL_INDEX_PAD)
    indices = torch.empty(rows, width, dtype=torch.int32, device=core.positions_casual.device)
    lengths = torch.empty(rows, dtype=torch.int32, device=indices.device)
    block = rows_per_program(rows)
    _combine_kernel[(triton.cdiv(rows, block), triton.cdiv(width, COLUMNS))](
        core.positions_casual, cache.request, compressed_base, cache.swa_offsets, cache.first_positions,
        topk_indices, topk_indices.stride(0), indices, lengths, rows, topk, ratio, swa_start, width,
        ROWS=block, COLUMNS=COLUMNS, WINDOW=WINDOW, num_warps=NUM_WARPS, enable_fp_fusion=True,
    )  # fmt: skip
    return indices, lengths


def compressed_region(core: DSV4AttnMetadata, cache: SparsePrefillCache, ratio: int) -> CompressedRegion:
    """The compressed half of the workspace for ``ratio`` 4 or 128, built once a forward."""
    if ratio not in cache.regions:
        if ratio == 4:
            region = c4_region(core.page_table, cache.last_rows, cache.max_seq_len)
        else:
            indices, _ = core.compressed_lists(128, "forward")
            region = c128_region(indices, cache.last_rows, cache.max_seq_len)
        cache.regions[ratio] = region
    return cache.regions[ratio]


def combined_indices(core: DSV4AttnMetadata, cache: SparsePrefillCache, ratio: int) -> tuple[Tensor, Tensor, int]:
    """``(indices, lengths, compressed rows)`` over the workspace for one layer.

    Those of ratio 0 and 128 depend on positions alone and are kept for the other layers of the forward; a C4 layer
    has a selection of its own each time. AssertionError if that was never written.
    """
    if ratio == 4:
        if core.c4_sparse_raw_indices is None:
            raise AssertionError("sparse prefill: c4_sparse_raw_indices is missing; write_c4_selection fills it")
        region = compressed_region(core, cache, 4)
        rows = region.slots.shape[0]
        lists = combine_topk_swa_indices(
            core, cache, ratio=4, topk=core.index_topk, topk_indices=core.c4_sparse_raw_indices,
            compressed_base=region.base, swa_start=rows,
        )  # fmt: skip
        return *lists, rows
    topk, base = 0, cache.swa_offsets
    if ratio == 128:
        region = compressed_region(core, cache, 128)
        topk, base = region.c_max, region.base
    start = base.shape[0] * topk if topk else 0
    if ratio not in cache.lists:
        every = torch.arange(topk, dtype=torch.int32, device=base.device).expand(core.rows, topk)
        cache.lists[ratio] = combine_topk_swa_indices(
            core, cache, ratio=ratio, topk=topk, topk_indices=every, compressed_base=base, swa_start=start
        )
    return *cache.lists[ratio], start
