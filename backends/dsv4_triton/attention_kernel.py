# ruff: noqa: N803, RUF005 - constexpr names are upper case, and Triton compiles a subset of Python
"""The sparse attention kernel: one program per (query row, block of heads, split of the row's keys).

Tiling. K and V are one 512-wide vector, so a key is fetched once, decoded once, and used twice: transposed for the
scores and as it is for the output. The accumulator of 64 heads by 512 columns is half of a program's registers at
eight warps; everything else is kept narrow: the columns are cut into parts (``key_tiles``), each decoded and left in
shared memory before the next is touched.

A row's keys are its main list, then its extra list, each in blocks of BLOCK_N that never straddle the two. A split is
SPLIT_BLOCKS consecutive blocks. Where splits begin and how many there are follows from the row's own lengths, so a
row's bits do not depend on the batch, on padding or on how wide the index tensors are. A row of one split is written
directly; of more, each split leaves an unnormalised accumulator, its running maximum and sum for ``combine``.

A key counts if its index lies in [0, capacity). For all others nothing is loaded and zeros stand in, so no byte of a
poisoned slot can reach a product (0 * NaN is NaN).
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4_triton.key_tiles import load_packed, load_parts, operand, part_start, part_width
from dsv4_triton.numerics import INTERPRETED, device_function, fp32_to_bf16
from dsv4_triton.splits import normaliser, row_blocks, row_length


@device_function
def _step(
    i, main_blocks, length, extra_length, index, extra_index, index_stride, extra_index_stride,
    cache, extra_cache, page, extra_page, magic, extra_magic, shift, extra_shift,
    stride, extra_stride, capacity, extra_capacity, query, scale, top, total, acc,
    PACKED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_N: tl.constexpr, ASM: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One block of keys: fetch, decode, scores, online softmax, accumulate. Both lists take one path by selects."""
    main = i < main_blocks
    key = tl.where(main, i, i - main_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    pointers = tl.where(main, index, extra_index) + key * tl.where(main, index_stride, extra_index_stride)
    slot = tl.load(pointers, mask=key < tl.where(main, length, extra_length), other=-1)
    # unsigned, so that negative indices exceed every capacity; addresses of invalid slots are formed but never read
    valid = slot.to(tl.uint32, bitcast=True) < tl.where(main, capacity, extra_capacity).to(tl.uint32)
    base = tl.where(main, cache, extra_cache)
    row_stride = tl.where(main, stride, extra_stride).to(tl.int64)
    if ALIGNED:
        row_stride = tl.multiple_of(row_stride, 16 if PACKED else 8)  # bytes, or bf16 elements
    if PACKED:
        entries = tl.where(main, page, extra_page)
        # slot // entries, by the constants of ``arguments.divider``: a division would cost more than a key's decode
        at_page = (slot.to(tl.int64) * tl.where(main, magic, extra_magic)) >> tl.where(main, shift, extra_shift)
        start = at_page * row_stride
        entry = slot - at_page.to(tl.int32) * entries
        scales = base + (start + (entries * 576 + entry * 8))
        keys = load_packed(base + (start + entry * 576), scales, valid, BLOCK_N, ASM, PARTS)
    else:
        keys = load_parts((base + slot.to(tl.int64) * row_stride)[:, None], valid[:, None], PARTS)

    s = tl.dot(query[0], tl.trans(keys[0]))
    for j in tl.static_range(1, PARTS):
        s = tl.dot(query[j], tl.trans(keys[j]), s)
    s = tl.where(valid[None, :], s * scale, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, axis=1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(s - shift[:, None])
    keep = tl.exp2(top - shift)
    total = total * keep + tl.sum(p, axis=1)
    p = operand(p)
    sums = (tl.dot(p, keys[0], acc[0] * keep[:, None]),)
    for j in tl.static_range(1, PARTS):
        sums = sums + (tl.dot(p, keys[j], acc[j] * keep[:, None]),)
    return new_top, total, sums


@triton.jit(do_not_specialize=[
    "seq", "heads", "q_b", "q_s", "q_h", "o_b", "o_s", "o_h", "l_b", "l_s", "l_h", "i_b", "i_s", "i_k", "e_b", "e_s",
    "e_k", "width", "extra_width", "given", "page", "extra_page", "magic", "extra_magic", "shift", "extra_shift",
    "stride", "extra_stride", "capacity", "extra_capacity", "first_row", "partial_splits",
], do_not_specialize_on_alignment=["lse", "sink", "index", "lengths", "extra_index", "extra_lengths"])  # fmt: skip
def attend(
    q, q_b, q_s, q_h, out, o_b, o_s, o_h, lse, l_b, l_s, l_h, sink, scale, seq, heads, first_row,
    cache, page, magic, shift, stride, capacity, index, i_b, i_s, i_k, lengths, width,
    extra_cache, extra_page, extra_magic, extra_shift, extra_stride, extra_capacity, extra_index, e_b, e_s, e_k,
    extra_lengths, extra_width, given, partial, partial_splits,
    PACKED: tl.constexpr, ALIGNED: tl.constexpr, ASM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_BLOCKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """``given`` has a bit for each optional argument: 1 lengths, 2 extra lengths, 4 sink."""
    head_blocks = (heads + BLOCK_H - 1) // BLOCK_H
    local = tl.program_id(0) // head_blocks
    split = tl.program_id(1)
    row = local + first_row
    b = (row // seq).to(tl.int64)
    s = (row % seq).to(tl.int64)
    length = row_length(lengths, width, given & 1, b)
    extra_length = row_length(extra_lengths, extra_width, given & 2, b)
    main_blocks, blocks, splits = row_blocks(length, extra_length, BLOCK_N, SPLIT_BLOCKS)
    if split >= splits:
        return

    h = (tl.program_id(0) % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    real = h < heads
    mask = real[:, None]
    q_row = b * q_b + s * q_s + h.to(tl.int64) * q_h
    if ALIGNED:
        q_row = tl.multiple_of(q_row, 8)
    query = load_parts((q + q_row)[:, None], mask, PARTS)
    index_row = index + b * i_b + s * i_s
    extra_index_row = extra_index + b * e_b + s * e_s
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = (tl.zeros([BLOCK_H, part_width(PARTS, 0)], tl.float32),)
    for j in tl.static_range(1, PARTS):
        acc = acc + (tl.zeros([BLOCK_H, part_width(PARTS, j)], tl.float32),)
    first = split * SPLIT_BLOCKS
    last = tl.minimum(first + SPLIT_BLOCKS, blocks)
    if INTERPRETED:  # range() over a loaded bound fails there with triton 3.6 and numpy >= 2.4
        i = first
        while i < last:
            top, total, acc = _step(
                i, main_blocks, length, extra_length, index_row, extra_index_row, i_k, e_k, cache, extra_cache,
                page, extra_page, magic, extra_magic, shift, extra_shift, stride, extra_stride,
                capacity, extra_capacity, query, scale, top, total, acc, PACKED, ALIGNED, BLOCK_N, ASM, PARTS,
            )  # fmt: skip
            i += 1
    else:
        for i in range(first, last):
            top, total, acc = _step(
                i, main_blocks, length, extra_length, index_row, extra_index_row, i_k, e_k, cache, extra_cache,
                page, extra_page, magic, extra_magic, shift, extra_shift, stride, extra_stride,
                capacity, extra_capacity, query, scale, top, total, acc, PACKED, ALIGNED, BLOCK_N, ASM, PARTS,
            )  # fmt: skip

    if splits == 1:
        sinks = tl.load(sink + h, mask=h < heads * ((given >> 2) & 1), other=float("-inf"))
        factor, row_lse = normaliser(top, total, sinks)
        tl.store(lse + b * l_b + s * l_s + h * l_h, row_lse, mask=real)
        out_row = b * o_b + s * o_s + h.to(tl.int64) * o_h
        if ALIGNED:
            out_row = tl.multiple_of(out_row, 8)
        for j in tl.static_range(PARTS):
            column = part_start(PARTS, j) + tl.arange(0, part_width(PARTS, j))
            tl.store((out + out_row)[:, None] + column[None, :], fp32_to_bf16(acc[j] * factor[:, None]), mask=mask)
    else:  # partial: [rows, splits, heads, 516], an accumulator, then maximum and sum (two words of padding)
        left = partial + ((local.to(tl.int64) * partial_splits + split) * heads + h) * 516
        tl.store(left + 512, top, mask=real)
        tl.store(left + 513, total, mask=real)
        for j in tl.static_range(PARTS):
            column = part_start(PARTS, j) + tl.arange(0, part_width(PARTS, j))
            tl.store(left[:, None] + column[None, :], acc[j], mask=mask)
