# ruff: noqa: N803, RUF005, SIM108 - constexpr names are upper case, and Triton compiles a subset of Python
"""The sparse attention kernel: one program per (query row, block of heads, split of the row's keys).

Tiling. K and V are one 512-wide vector, so a key is fetched once, decoded once, and used twice: transposed for the
scores and as it is for the output. The accumulator of 64 heads by 512 columns is half of a program's registers at
eight warps; everything else is kept narrow: 512 columns in parts of 3 * 128 + 64 + 64 (the last is the rope), each
part decoded and left in shared memory before the next is touched. Wider parts spill, narrower ones starve wgmma.

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

from dsv4_triton.numerics import (
    INTERPRETED,
    LN2,
    LOG2E,
    bf16_to_fp32,
    decode_e4m3,
    decode_packed,
    decode_scale,
    device_function,
    fp32_to_bf16,
    packed_scale,
)


@triton.constexpr_function
def part_width(parts, j):
    """Columns of part ``j`` when the 512 columns are worked on in ``parts`` parts."""
    return 512 if parts == 1 else (128, 128, 128, 64, 64)[j]


@triton.constexpr_function
def part_start(parts, j):
    """First column of part ``j``."""
    return 0 if parts == 1 else (0, 128, 256, 384, 448)[j]


@device_function
def operand(x):
    """A tile as the matrix product takes it: bf16, or fp32 where the interpreter cannot compute in bf16."""
    if INTERPRETED:
        y = x.to(tl.float32)
    else:
        y = x.to(tl.bfloat16)
    return y


@device_function
def _load_bf16(pointers, mask):
    """bf16 tile as an operand, zero where masked."""
    if INTERPRETED:
        y = bf16_to_fp32(tl.load(pointers.to(tl.pointer_type(tl.int16)), mask=mask, other=0))
    else:
        y = tl.load(pointers, mask=mask, other=0.0)
    return y


@device_function
def _load_parts(rows, mask, PARTS: tl.constexpr):
    """512 bf16 columns of rows (pointers ``[N, 1]``) as a tuple of operands, one a part."""
    if PARTS == 1:
        parts = (_load_bf16(rows + tl.arange(0, 512)[None, :], mask),)
    else:
        parts = (
            _load_bf16(rows + tl.arange(0, 128)[None, :], mask),
            _load_bf16(rows + 128 + tl.arange(0, 128)[None, :], mask),
            _load_bf16(rows + 256 + tl.arange(0, 128)[None, :], mask),
            _load_bf16(rows + 384 + tl.arange(0, 64)[None, :], mask),
            _load_bf16(rows + 448 + tl.arange(0, 64)[None, :], mask),
        )
    return parts


@device_function
def _load_nope(rows, scales, valid, OFF: tl.constexpr, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, ASM: tl.constexpr):
    """Columns OFF .. OFF + 64 * GROUPS of packed rows, decoded: ``[BLOCK_N, 64 * GROUPS]``.

    ``scales``: a row's eight scale bytes as one int64. Bytes travel four to an int32 lane, 16 lanes a group.
    """
    group = tl.arange(0, GROUPS)
    lane = tl.arange(0, 16)
    column = (group[:, None] * 16 + lane[None, :] + OFF // 4)[None, :, :]
    pointers = rows.to(tl.pointer_type(tl.int32))[:, None, None] + column
    lanes = tl.load(pointers, mask=valid[:, None, None], other=0)
    byte = ((scales[:, None] >> ((group + OFF // 64) * 8).to(tl.int64)[None, :]) & 255).to(tl.int32)
    if ASM:
        first, second = packed_scale(byte)
        b0, b1, b2, b3 = decode_packed(lanes, first[:, :, None], second[:, :, None])
    else:
        factor = decode_scale(byte)[:, :, None]
        b0 = operand(decode_e4m3(lanes & 255) * factor)
        b1 = operand(decode_e4m3((lanes >> 8) & 255) * factor)
        b2 = operand(decode_e4m3((lanes >> 16) & 255) * factor)
        b3 = operand(decode_e4m3((lanes >> 24) & 255) * factor)
    return tl.reshape(tl.join(tl.join(b0, b2), tl.join(b1, b3)), [BLOCK_N, GROUPS * 64])


@device_function
def _load_packed(rows, scales, valid, BLOCK_N: tl.constexpr, ASM: tl.constexpr, PARTS: tl.constexpr):
    """Packed rows (byte pointers of data and of scales, ``[BLOCK_N]``) as a tuple of operands, one a part.

    Interpreted, an operation costs the same for 64 columns as for 512, so all columns are one part there.
    """
    if PARTS == 1:
        column = tl.arange(0, 512)[None, :]
        nope = valid[:, None] & (column < 448)
        code = tl.load(rows[:, None] + column, mask=nope, other=0)
        factor = decode_scale(tl.load(scales[:, None] + tl.arange(0, 8)[None, :], mask=valid[:, None], other=0))
        factor = tl.reshape(tl.broadcast_to(factor[:, :, None], [BLOCK_N, 8, 64]), [BLOCK_N, 512])
        rope = (rows[:, None] + (2 * column - 448)).to(tl.pointer_type(tl.int16))
        rope = bf16_to_fp32(tl.load(rope, mask=valid[:, None] & (column >= 448), other=0))
        parts = (operand(tl.where(column < 448, decode_e4m3(code) * factor, rope)),)
    else:
        bytes8 = tl.load(scales.to(tl.pointer_type(tl.int64)), mask=valid, other=0)
        parts = (
            _load_nope(rows, bytes8, valid, 0, 2, BLOCK_N, ASM),
            _load_nope(rows, bytes8, valid, 128, 2, BLOCK_N, ASM),
            _load_nope(rows, bytes8, valid, 256, 2, BLOCK_N, ASM),
            _load_nope(rows, bytes8, valid, 384, 1, BLOCK_N, ASM),
            _load_bf16(
                (rows + 448).to(tl.pointer_type(tl.bfloat16))[:, None] + tl.arange(0, 64)[None, :], valid[:, None]
            ),
        )
    return parts


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
        keys = _load_packed(base + (start + entry * 576), scales, valid, BLOCK_N, ASM, PARTS)
    else:
        keys = _load_parts((base + slot.to(tl.int64) * row_stride)[:, None], valid[:, None], PARTS)

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


@device_function
def row_blocks(length, extra_length, BLOCK_N: tl.constexpr, SPLIT_BLOCKS: tl.constexpr):
    """Blocks of the main list, blocks of both, and splits of a row: functions of its own clamped lengths."""
    main_blocks = (length + BLOCK_N - 1) // BLOCK_N
    blocks = main_blocks + (extra_length + BLOCK_N - 1) // BLOCK_N
    splits = tl.maximum((blocks + SPLIT_BLOCKS - 1) // SPLIT_BLOCKS, 1)
    return main_blocks, blocks, splits


@device_function
def row_length(lengths, width, given, at):
    """A row's list length, clamped to [0, width]; the full width where no lengths are given."""
    n = tl.load(lengths + at, mask=given != 0, other=width)
    return tl.minimum(tl.maximum(n, 0), width)


@device_function
def normaliser(top, total, sink):
    """Factor of the output and natural-log lse of a row: 0 and +inf without keys; the sink counts for the first only.

    ``total == 0`` tells an empty row, and is false for NaN: a poisoned row must come out as NaN, not as zero.
    """
    empty = total == 0.0
    denominator = tl.where(empty, 1.0, total + tl.exp2(sink * LOG2E - tl.where(empty, 0.0, top)))
    factor = tl.where(empty, 0.0, 1.0 / denominator)
    lse = tl.where(empty, float("inf"), (top + tl.log2(tl.where(empty, 1.0, total))) * LN2)
    return factor, lse


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
    query = _load_parts((q + q_row)[:, None], mask, PARTS)
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


@triton.jit(do_not_specialize=[
    "seq", "heads", "o_b", "o_s", "o_h", "l_b", "l_s", "l_h", "width", "extra_width", "given", "first_row",
    "partial_splits",
], do_not_specialize_on_alignment=["lse", "sink", "lengths", "extra_lengths"])  # fmt: skip
def combine(
    partial, partial_splits, out, o_b, o_s, o_h, lse, l_b, l_s, l_h, sink, seq, heads, first_row,
    lengths, width, extra_lengths, extra_width, given,
    ALIGNED: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_BLOCKS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Join a row's splits in ascending order: one program per (row, HEADS heads), idle where the row had one split.

    Only splits that the row's own lengths call for are read; the rest of the workspace was never written. A split
    without keys has weight exactly 0 and zeros for its sum, so trailing padding leaves the bits alone.
    """
    local = tl.program_id(0)
    row = local + first_row
    b = (row // seq).to(tl.int64)
    s = (row % seq).to(tl.int64)
    length = row_length(lengths, width, given & 1, b)
    extra_length = row_length(extra_lengths, extra_width, given & 2, b)
    _, _, splits = row_blocks(length, extra_length, BLOCK_N, SPLIT_BLOCKS)
    if splits == 1:
        return
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, 512)[None, :]
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, 512], tl.float32)
    i = splits * 0
    while i < splits:
        at = partial + ((local.to(tl.int64) * partial_splits + i) * heads + h) * 516
        split_top = tl.load(at + 512)
        new_top = tl.maximum(top, split_top)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        keep = tl.exp2(top - shift)
        weight = tl.exp2(split_top - shift)
        total = total * keep + tl.load(at + 513) * weight
        acc = acc * keep[:, None] + tl.load(at[:, None] + column) * weight[:, None]
        top = new_top
        i += 1
    sinks = tl.load(sink + h, mask=h < heads * ((given >> 2) & 1), other=float("-inf"))
    factor, row_lse = normaliser(top, total, sinks)
    tl.store(lse + b * l_b + s * l_s + h * l_h, row_lse)
    out_row = b * o_b + s * o_s + h.to(tl.int64) * o_h
    if ALIGNED:
        out_row = tl.multiple_of(out_row, 8)
    tl.store((out + out_row)[:, None] + column, fp32_to_bf16(acc * factor[:, None]))
