# ruff: noqa: N803, RUF059, SIM102 - constexpr names are upper case, and Gluon compiles a subset of Python
"""Sparse FP8 attention for Hopper in Gluon: warps that hand blocks of keys to each other in shared memory.

One item of work is (query row, 64 heads, split); a block is 64 keys. For each block
``producer`` (8 warps) gathers packed rows in 16-byte pieces, decodes e4m3 to bf16 in registers and leaves 512 columns
in shared memory; the next block's bytes are asked for as soon as that is done;
``left`` (4 warps) computes the scores, the online softmax and output columns 0..255;
``right`` (4 warps) computes columns 256..511 from the probabilities that ``left`` leaves in shared memory.

A row's bits depend on its lists and lengths alone, cut into blocks and splits of fixed size, as in
``attention_kernel``. The grid only decides who works on what: a program takes items ``pid, pid + programs, ...``, so
that the next item's first keys and queries arrive while the last one drains.

Keys that do not count are zeros with a bias of -inf. A key with an e4m3 NaN has a bias of NaN, which the softmax
spreads to every head and column, as NaN * q would; a scale byte of 255 becomes a factor of NaN and does so by itself.

Shared memory is written by ordinary stores and read by wgmma, through another proxy. The fence between the two stands
behind the reader's wait: in the producer it would also wait for the loads of the next block.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4_triton.numerics import LN2, LOG2E

#: keys a block, and blocks in shared memory
BLOCK_N = 64
STAGES = gl.constexpr(2)
#: query heads an item
HEADS = 64
PRODUCER_WARPS = 8
#: words of fp32 that a split leaves for ``combine``: 512 sums, the maximum, the total, two of padding
PARTIAL_WORDS = gl.constexpr(516)

BLOCK = gl.constexpr(BLOCK_N)
TOP_BITS = gl.constexpr(0x80808080 - (1 << 32))  # as int32
# Scores [64 heads, 64 keys] and sums [64 heads, 128 or 64 columns] as wgmma lays them out over four warps. 256 columns
# in one instruction would need more registers than 16 warps can be compiled for.
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
SUMS_128 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
SUMS_64 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
SWIZZLED_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# [rows, groups of 64 bytes, words]: four lanes fetch a row's group in 16-byte pieces, eight rows a warp.
WORDS = gl.constexpr(gl.BlockedLayout([1, 1, 4], [8, 1, 4], [PRODUCER_WARPS, 1, 1], [2, 1, 0]))
ROWS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))
# The same rows in the same threads, for the rope's 32 words.
ROPE_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [PRODUCER_WARPS, 1], [1, 0]))
# 16-byte pieces of bf16 rows of 64 columns.
PIECES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))

# Triton 3.7 renamed it.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _decode(words, first, second):
    """Four e4m3 bytes a word, times a scale in two factors -> two words of bf16 pairs.

    ``s eeee mmm`` placed as ``s 0000eeee mmm0000`` is the bf16 value times 2**-120, subnormals included. ``prmt``
    spreads each byte over a half word behind eight copies of its sign.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        prmt.b32 a, $2, 0, 0x9180;
        prmt.b32 b, $2, 0, 0xB3A2;
        shl.b32 a, a, 4;
        shl.b32 b, b, 4;
        and.b32 a, a, 0x87f087f0;
        and.b32 b, b, 0x87f087f0;
        mul.rn.bf16x2 a, a, $3;
        mul.rn.bf16x2 b, b, $3;
        mul.rn.bf16x2 $0, a, $4;
        mul.rn.bf16x2 $1, b, $4;
        }""",
        "=&r,=&r,r,r,r",
        [words, first, second],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _scale(scales, OFF: gl.constexpr, GROUPS: gl.constexpr):
    """A row's eight scale bytes -> the two factors of ``_decode`` for GROUPS groups from byte column OFF.

    The product is 2**(byte - 127) times the 2**120 that ``_decode`` owes. Byte 135 and above exceed bf16 in one factor.
    """
    group = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))
    shift = (8 * (gl.expand_dims(group, 0) + OFF // 64)).to(gl.int64)
    byte = ((gl.expand_dims(scales, 1) >> shift) & 255).to(gl.int32)
    first = gl.where(byte == 255, 0x7FC0, (gl.minimum(byte, 134) + 120) << 7)
    second = (gl.maximum(byte, 134) - 7) << 7
    return first | (first << 16), second | (second << 16)


@gluon.jit
def _raw(base, offsets, valid, OFF: gl.constexpr, GROUPS: gl.constexpr):
    """64 * GROUPS bytes from byte OFF of each row: words ``[BLOCK, GROUPS, 16]``, zero for rows that do not count."""
    group = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))
    word = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))
    column = gl.expand_dims(gl.expand_dims(group, 0), 2) * 16 + gl.expand_dims(gl.expand_dims(word, 0), 1) + OFF // 4
    at = base + (gl.expand_dims(gl.expand_dims(offsets, 1), 2).to(gl.int64) * 4 + column)
    return gl.load(at, mask=gl.expand_dims(gl.expand_dims(valid, 1), 2), other=0)


@gluon.jit
def _put(tile, words, scales, OFF: gl.constexpr, GROUPS: gl.constexpr):
    """Decode words into the bf16 columns of ``tile``; returns ``[BLOCK, 4]``, bit 7 of a byte set where one was NaN."""
    first, second = _scale(scales, OFF, GROUPS)
    first, words = gl.broadcast(gl.expand_dims(first, 2), words)
    second, words = gl.broadcast(gl.expand_dims(second, 2), words)
    low, high = _decode(words, first, second)
    _words(tile, GROUPS * 32).store(gl.reshape(gl.join(low, high), [BLOCK, GROUPS * 32]))
    # (byte & 0x7f) + 1 carries into bit 7 for 0x7f and 0xff only
    carries = (words & 0x7F7F7F7F) + 0x01010101
    return gl.reduce_or(gl.reduce_or(gl.reshape(carries, [BLOCK, GROUPS, 4, 4]), 3), 1)


@gluon.jit
def _words(tile, WIDTH: gl.constexpr):
    """A tile of bf16 pairs as 32-bit words."""
    return tile._reinterpret(gl.int32, [BLOCK, WIDTH], SWIZZLED_WORDS)


@gluon.jit
def _lengths(rows, item, SPLIT: gl.constexpr, HEAD_BLOCKS: gl.constexpr):
    """Clamped lengths of both lists of an item's row."""
    lengths, extra_lengths, width, extra_width, given, seq, first_row, splits = rows
    local = item // HEAD_BLOCKS
    if SPLIT:
        local = local // splits
    b = (local + first_row) // seq
    n = gl.load(lengths + b, mask=(given & 1) != 0, other=width)
    extra = gl.load(extra_lengths + b, mask=(given & 2) != 0, other=extra_width)
    return gl.minimum(gl.maximum(n, 0), width), gl.minimum(gl.maximum(extra, 0), extra_width)


@gluon.jit
def _place(rows, item, SPLIT: gl.constexpr, HEAD_BLOCKS: gl.constexpr):
    """Where an item is: row in this launch, request, row of the request, block of heads, split."""
    lengths, extra_lengths, width, extra_width, given, seq, first_row, splits = rows
    head_block = item % HEAD_BLOCKS
    local = item // HEAD_BLOCKS
    split = item * 0
    if SPLIT:
        split = local % splits
        local = local // splits
    row = local + first_row
    return local, row // seq, row % seq, head_block, split


@gluon.jit
def _offset(i, i_stride, j, j_stride):
    return i.to(gl.int64) * i_stride + j.to(gl.int64) * j_stride


@gluon.jit
def _span(n, extra, split, SPLIT: gl.constexpr, SPLIT_BLOCKS: gl.constexpr):
    """First block of an item, how many it has, and the row's splits; as ``attention_kernel.row_blocks`` cuts them.

    A row without keys has one block of nothing. A split that the row does not need has no blocks.
    """
    blocks = (n + BLOCK - 1) // BLOCK + (extra + BLOCK - 1) // BLOCK
    first = split * 0
    splits = first + 1
    count = gl.maximum(blocks, 1)
    if SPLIT:
        splits = gl.maximum((blocks + SPLIT_BLOCKS - 1) // SPLIT_BLOCKS, 1)
        first = split * SPLIT_BLOCKS
        count = gl.where(split < splits, gl.maximum(gl.minimum(blocks - first, SPLIT_BLOCKS), 1), 0)
    return first, count, splits


@gluon.jit
def _slots(at, n, extra, block):
    """A block of indices, -1 beyond the list's length: one path for both lists by scalar selects."""
    index, extra_index = at
    main_blocks = (n + BLOCK - 1) // BLOCK
    main = block < main_blocks
    key = gl.where(main, block, block - main_blocks) * BLOCK + gl.arange(0, BLOCK, ROWS)
    return gl.load(gl.where(main, index, extra_index) + key, mask=key < gl.where(main, n, extra), other=-1)


@gluon.jit
def _locate(lists, n, block, slot):
    """Where the keys of a block are (list's words, offset of each key), their scale bytes, and which of them count."""
    cache, extra_cache, shift, extra_shift, stride, extra_stride, capacity, extra_capacity = lists
    main = block < (n + BLOCK - 1) // BLOCK
    # unsigned, so that negative indices exceed every capacity; addresses of invalid slots are formed but never read
    valid = slot.to(gl.uint32, bitcast=True) < gl.where(main, capacity, extra_capacity).to(gl.uint32)
    bits = gl.where(main, shift, extra_shift)
    at_page = slot >> bits
    entry = slot - (at_page << bits)
    start = at_page * gl.where(main, stride, extra_stride)  # in pieces of 16 bytes: 32 bits reach 32 GiB
    base = gl.where(main, cache, extra_cache)
    scale_base = base.to(gl.pointer_type(gl.int64), bitcast=True)
    scales = gl.load(scale_base + (start.to(gl.int64) * 2 + ((72 << bits) + entry)), mask=valid, other=0)
    return base, start + entry * 36, scales, valid


@gluon.jit
def _fetch(place):
    """Raw bytes of a block: words of groups 0 and 1, 2 and 3, 4 and 5, and 6."""
    base, offsets, scales, valid = place
    a = _raw(base, offsets, valid, 0, 2)
    b = _raw(base, offsets, valid, 128, 2)
    c = _raw(base, offsets, valid, 256, 2)
    return a, b, c, _raw(base, offsets, valid, 384, 1)


@gluon.jit
def _copy_rope(tile, place, full):
    """The rope needs no decoding: bytes on their way into ``tile``, which ``full`` waits for; zeros for other rows."""
    base, offsets, scales, valid = place
    offsets = gl.convert_layout(offsets, gl.SliceLayout(1, ROPE_WORDS), assert_trivial=True)
    valid = gl.convert_layout(valid, gl.SliceLayout(1, ROPE_WORDS), assert_trivial=True)
    word = gl.arange(0, 32, gl.SliceLayout(0, ROPE_WORDS)) + 112
    pointers = base + (gl.expand_dims(offsets, 1).to(gl.int64) * 4 + gl.expand_dims(word, 0))
    async_copy.async_copy_global_to_shared(_words(tile, 32), pointers, mask=gl.expand_dims(valid, 1))
    async_copy.mbarrier_arrive(full)


@gluon.jit
def producer(
    rows, lists, indices, keys, bars, items,
    SPLIT: gl.constexpr, HEAD_BLOCKS: gl.constexpr, SPLIT_BLOCKS: gl.constexpr,
):  # fmt: skip
    index, extra_index, i_b, i_s, e_b, e_s = indices
    bias = keys[5]
    full, empty = bars
    done = 0  # blocks of all items so far: stage and phase of the next one
    step = gl.num_programs(0)
    for item in range(gl.program_id(0), items, step):
        local, request, row, head_block, split = _place(rows, item, SPLIT, HEAD_BLOCKS)
        n, extra = _lengths(rows, item, SPLIT, HEAD_BLOCKS)
        first, count, splits = _span(n, extra, split, SPLIT, SPLIT_BLOCKS)
        at = (index + _offset(request, i_b, row, i_s), extra_index + _offset(request, e_b, row, e_s))
        where = _locate(lists, n, first, _slots(at, n, extra, first))
        a, b, c, d = _fetch(where)
        slot = _slots(at, n, extra, first + 1)
        for i in range(first, first + count):
            stage = done % STAGES
            mbarrier.wait(empty.index(stage), ((done // STAGES) & 1) ^ 1)
            _copy_rope(keys[4].index(stage), where, full.index(stage))
            scales = where[2]
            flags = _put(keys[0].index(stage), a, scales, 0, 2)
            flags |= _put(keys[1].index(stage), b, scales, 128, 2)
            flags |= _put(keys[2].index(stage), c, scales, 256, 2)
            flags |= _put(keys[3].index(stage), d, scales, 384, 1)
            poisoned = gl.convert_layout(gl.reduce_or(flags, 1), ROWS) & TOP_BITS
            value = gl.where(poisoned != 0, float("nan"), 0.0)
            bias.index(stage).store(gl.where(where[3], value, float("-inf")))
            mbarrier.arrive(full.index(stage), count=1)
            where = _locate(lists, n, i + 1, slot)
            a, b, c, d = _fetch(where)
            slot = _slots(at, n, extra, i + 2)
            done += 1


@gluon.jit
def _stage(keys, stage):
    """The five tiles of keys of a stage."""
    return (
        keys[0].index(stage), keys[1].index(stage), keys[2].index(stage), keys[3].index(stage), keys[4].index(stage),
    )  # fmt: skip


@gluon.jit
def _scores(query, tiles):
    s = gl.zeros([64, BLOCK], gl.float32, SCORES)
    s = warpgroup_mma(query[0], tiles[0].permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma(query[1], tiles[1].permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(query[2], tiles[2].permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(query[3], tiles[3].permute((1, 0)), s, is_async=True)
    return warpgroup_mma(query[4], tiles[4].permute((1, 0)), s, is_async=True)


@gluon.jit
def _soften(s, bias, top, total, scale):
    """Online softmax in base 2: probabilities, factor of what came before, maximum, sum."""
    bias = gl.expand_dims(bias.load(gl.SliceLayout(0, SCORES)), 0)
    s = gl.where(bias == float("-inf"), float("-inf"), s * scale + bias)
    new_top = gl.maximum(top, gl.max(s, 1))
    shift = gl.where(new_top == float("-inf"), 0.0, new_top)
    p = gl.exp2(s - gl.expand_dims(shift, 1))
    keep = gl.exp2(top - shift)
    return p, keep, new_top, total * keep + gl.sum(p, 1)


@gluon.jit
def _now(x):
    """x, not known to be the same from item to item: what follows from it is not kept across the loop over keys."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _tile_offsets(stride, WIDTH: gl.constexpr):
    """Offsets of a tile of 64 heads by WIDTH columns, heads ``stride`` pieces of eight elements apart."""
    h = gl.expand_dims(_now(gl.arange(0, 64, gl.SliceLayout(1, PIECES))), 1)
    return h * (stride * 8) + gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, PIECES)), 0)


@gluon.jit
def _query(q, strides, place, tiles):
    """Queries of an item, on their way into shared memory."""
    local, b, s, head_block, split = place
    q_b, q_s, q_h = strides
    rows = q + (_offset(b, q_b, s, q_s) + head_block.to(gl.int64) * 64 * q_h) * 8
    async_copy.async_copy_global_to_shared(tiles[0], rows + _tile_offsets(q_h, 128))
    async_copy.async_copy_global_to_shared(tiles[1], rows + (128 + _tile_offsets(q_h, 128)))
    async_copy.async_copy_global_to_shared(tiles[2], rows + (256 + _tile_offsets(q_h, 128)))
    async_copy.async_copy_global_to_shared(tiles[3], rows + (384 + _tile_offsets(q_h, 64)))
    async_copy.async_copy_global_to_shared(tiles[4], rows + (448 + _tile_offsets(q_h, 64)))
    async_copy.commit_group()


@gluon.jit
def _emit(
    out, place, acc, factor, tile, splits, partial, partial_splits, heads,
    COLUMN: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Columns of an item: normalised bf16 through a tile of shared memory, or the bare sums of a split."""
    local, b, s, head_block, split = place
    base, o_b, o_s, o_h = out
    acc = acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, LAYOUT)), 1)
    if SPLIT:
        if splits > 1:
            h = head_block * 64 + _now(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)))
            row = ((local.to(gl.int64) * partial_splits + split) * heads + h) * PARTIAL_WORDS
            column = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT)) + COLUMN
            gl.store(partial + (gl.expand_dims(row, 1) + gl.expand_dims(column, 0)), acc)
    tile.store(acc.to(gl.bfloat16))
    x = tile.load(PIECES)
    start = (_offset(b, o_b, s, o_s) + head_block.to(gl.int64) * 64 * o_h) * 8 + COLUMN
    pointers = base + start + _tile_offsets(o_h, WIDTH)
    if SPLIT:
        gl.store(pointers, x, mask=splits == 1)
    else:
        gl.store(pointers, x)


@gluon.jit
def left(
    q, q_strides, out, lse, sink, rows, scale, heads, partial, partial_splits, query, keys, hand, bars, hand_bars,
    items, SPLIT: gl.constexpr, HEAD_BLOCKS: gl.constexpr, SPLIT_BLOCKS: gl.constexpr,
):  # fmt: skip
    probabilities, keeps, factors = hand
    full, empty = bars
    ready, taken, finished, seen = hand_bars
    lse_base, l_b, l_s, l_h = lse
    bias = keys[5]
    h = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    done = 0
    rows_done = 0
    step = gl.num_programs(0)
    n, extra = _lengths(rows, gl.program_id(0), SPLIT, HEAD_BLOCKS)
    _query(q, q_strides, _place(rows, gl.program_id(0), SPLIT, HEAD_BLOCKS), query)
    for item in range(gl.program_id(0), items, step):
        place = _place(rows, item, SPLIT, HEAD_BLOCKS)
        local, b, s, head_block, split = place
        first, count, splits = _span(n, extra, split, SPLIT, SPLIT_BLOCKS)
        after = gl.minimum(item + step, items - 1)
        given = rows[4]
        sinks = gl.load(sink + head_block * 64 + h, mask=(h >= 0) & ((given & 4) != 0), other=float("-inf"))
        async_copy.wait_group(0)
        if count > 0:
            fence_async_shared()
            thread_barrier()
            acc_a = gl.zeros([64, 128], gl.float32, SUMS_128)
            acc_b = gl.zeros([64, 128], gl.float32, SUMS_128)
            top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
            total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
            stage = done % STAGES
            phase = (done // STAGES) & 1
            mbarrier.wait(full.index(stage), phase)
            fence_async_shared()
            s_ = _scores(query, _stage(keys, stage))
            s_ = warpgroup_mma_wait(0, deps=[s_])
            p, keep, top, total = _soften(s_, bias.index(stage), top, total, scale)
            p16 = p.to(gl.bfloat16)
            mbarrier.wait(taken.index(stage), phase ^ 1)
            probabilities.index(stage).store(p16)
            keeps.index(stage).store(keep)
            mbarrier.arrive(ready.index(stage), count=1)
            for _i in range(1, count):
                before = stage
                done += 1
                stage = done % STAGES
                phase = (done // STAGES) & 1
                operand = gl.convert_layout(p16, gl.DotOperandLayout(0, SUMS_128, 2))
                sums_a = warpgroup_mma(operand, keys[0].index(before), acc_a, is_async=True)
                sums_b = warpgroup_mma(operand, keys[1].index(before), acc_b, is_async=True)
                # The stage is given back before the next one is waited for: were it held through the next softmax,
                # decoding and attending would take turns.
                acc_a, acc_b = warpgroup_mma_wait(0, deps=[sums_a, sums_b])
                mbarrier.arrive(empty.index(before), count=1)
                mbarrier.wait(full.index(stage), phase)
                fence_async_shared()
                s_ = _scores(query, _stage(keys, stage))
                s_ = warpgroup_mma_wait(0, deps=[s_])
                p, keep, top, total = _soften(s_, bias.index(stage), top, total, scale)
                p16 = p.to(gl.bfloat16)
                mbarrier.wait(taken.index(stage), phase ^ 1)
                probabilities.index(stage).store(p16)
                keeps.index(stage).store(keep)
                mbarrier.arrive(ready.index(stage), count=1)
                kept = gl.expand_dims(gl.convert_layout(keep, gl.SliceLayout(1, SUMS_128)), 1)
                acc_a = acc_a * kept
                acc_b = acc_b * kept
            done += 1
            thread_barrier()  # every warp has read the queries
            if item + step < items:
                _query(q, q_strides, _place(rows, after, SPLIT, HEAD_BLOCKS), query)
            operand = gl.convert_layout(p16, gl.DotOperandLayout(0, SUMS_128, 2))
            sums_a = warpgroup_mma(operand, keys[0].index(stage), acc_a, is_async=True)
            sums_b = warpgroup_mma(operand, keys[1].index(stage), acc_b, is_async=True)
            # total == 0 tells an empty row and is false for NaN: a poisoned row must not come out as zeros
            vacant = total == 0.0
            filled = gl.where(vacant, 1.0, total)
            weight = gl.exp2(sinks * LOG2E - gl.where(vacant, 0.0, top))
            factor = gl.where(vacant, 0.0, 1.0 / (filled + weight))
            row_lse = gl.where(vacant, float("inf"), (top + gl.log2(filled)) * LN2)
            lse_at = lse_base + (_offset(b, l_b, s, l_s) + (head_block * 64 + h).to(gl.int64) * l_h)
            if SPLIT:
                factor = gl.where(splits > 1, 1.0, factor)
                gl.store(lse_at, row_lse, mask=(h >= 0) & (splits == 1))
                row = ((local.to(gl.int64) * partial_splits + split) * heads + head_block * 64 + h) * PARTIAL_WORDS
                gl.store(partial + (row + 512), top, mask=(h >= 0) & (splits > 1))
                gl.store(partial + (row + 513), total, mask=(h >= 0) & (splits > 1))
            else:
                gl.store(lse_at, row_lse)
            n, extra = _lengths(rows, after, SPLIT, HEAD_BLOCKS)
            mbarrier.wait(seen, (rows_done & 1) ^ 1)
            factors.store(factor)
            mbarrier.arrive(finished, count=1)
            acc_a, acc_b = warpgroup_mma_wait(0, deps=[sums_a, sums_b])
            _emit(
                out, place, acc_a, factor, keys[0].index(stage), splits, partial, partial_splits, heads,
                0, 128, SUMS_128, SPLIT,
            )  # fmt: skip
            _emit(
                out, place, acc_b, factor, keys[1].index(stage), splits, partial, partial_splits, heads,
                128, 128, SUMS_128, SPLIT,
            )  # fmt: skip
            mbarrier.arrive(empty.index(stage), count=1)
            rows_done += 1
        else:
            n, extra = _lengths(rows, after, SPLIT, HEAD_BLOCKS)
            if item + step < items:
                _query(q, q_strides, _place(rows, after, SPLIT, HEAD_BLOCKS), query)


@gluon.jit
def right(
    out, rows, heads, partial, partial_splits, keys, hand, bars, hand_bars, items,
    SPLIT: gl.constexpr, HEAD_BLOCKS: gl.constexpr, SPLIT_BLOCKS: gl.constexpr,
):  # fmt: skip
    probabilities, keeps, factors = hand
    full, empty = bars
    ready, taken, finished, seen = hand_bars
    done = 0
    rows_done = 0
    step = gl.num_programs(0)
    n, extra = _lengths(rows, gl.program_id(0), SPLIT, HEAD_BLOCKS)
    for item in range(gl.program_id(0), items, step):
        place = _place(rows, item, SPLIT, HEAD_BLOCKS)
        first, count, splits = _span(n, extra, place[4], SPLIT, SPLIT_BLOCKS)
        if count > 0:
            acc_b = gl.zeros([64, 128], gl.float32, SUMS_128)
            acc_c = gl.zeros([64, 64], gl.float32, SUMS_64)
            acc_rope = gl.zeros([64, 64], gl.float32, SUMS_64)
            for i in range(count):
                stage = done % STAGES
                phase = (done // STAGES) & 1
                mbarrier.wait(full.index(stage), phase)
                mbarrier.wait(ready.index(stage), phase)
                fence_async_shared()
                keep = keeps.index(stage).load(gl.SliceLayout(1, SUMS_128))
                keep_64 = gl.expand_dims(gl.convert_layout(keep, gl.SliceLayout(1, SUMS_64)), 1)
                acc_b = acc_b * gl.expand_dims(keep, 1)
                acc_c = acc_c * keep_64
                acc_rope = acc_rope * keep_64
                sums_b = warpgroup_mma(probabilities.index(stage), keys[2].index(stage), acc_b, is_async=True)
                sums_c = warpgroup_mma(probabilities.index(stage), keys[3].index(stage), acc_c, is_async=True)
                sums_rope = warpgroup_mma(probabilities.index(stage), keys[4].index(stage), acc_rope, is_async=True)
                acc_b, acc_c, acc_rope = warpgroup_mma_wait(0, deps=[sums_b, sums_c, sums_rope])
                mbarrier.arrive(taken.index(stage), count=1)
                mbarrier.arrive(empty.index(stage), count=1, pred=i + 1 < count)
                done += 1
            mbarrier.wait(finished, rows_done & 1)
            factor = factors.load(gl.SliceLayout(1, SUMS_128))
            mbarrier.arrive(seen, count=1)
            n, extra = _lengths(rows, gl.minimum(item + step, items - 1), SPLIT, HEAD_BLOCKS)
            last = (done - 1) % STAGES
            tiles = _stage(keys, last)
            _emit(
                out, place, acc_b, factor, tiles[2], splits, partial, partial_splits, heads,
                256, 128, SUMS_128, SPLIT,
            )  # fmt: skip
            _emit(
                out, place, acc_c, factor, tiles[3], splits, partial, partial_splits, heads,
                384, 64, SUMS_64, SPLIT,
            )  # fmt: skip
            _emit(
                out, place, acc_rope, factor, tiles[4], splits, partial, partial_splits, heads,
                448, 64, SUMS_64, SPLIT,
            )  # fmt: skip
            mbarrier.arrive(empty.index(last), count=1)
            rows_done += 1
        else:
            n, extra = _lengths(rows, gl.minimum(item + step, items - 1), SPLIT, HEAD_BLOCKS)


@gluon.jit(do_not_specialize=[
    "seq", "q_b", "q_s", "q_h", "o_b", "o_s", "o_h", "l_b", "l_s", "l_h", "i_b", "i_s", "e_b", "e_s",
    "width", "extra_width", "given", "shift", "extra_shift", "stride", "extra_stride", "capacity", "extra_capacity",
    "first_row", "splits", "items",
], do_not_specialize_on_alignment=[
    "lse", "sink", "index", "lengths", "extra_index", "extra_lengths", "partial",
])  # fmt: skip
def attend(
    q, q_b, q_s, q_h, out, o_b, o_s, o_h, lse, l_b, l_s, l_h, sink, scale, seq, first_row, items,
    cache, shift, stride, capacity, index, i_b, i_s, lengths, width,
    extra_cache, extra_shift, extra_stride, extra_capacity, extra_index, e_b, e_s, extra_lengths, extra_width,
    given, partial, splits,
    SPLIT: gl.constexpr, HEAD_BLOCKS: gl.constexpr, SPLIT_BLOCKS: gl.constexpr,
    RIGHT_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Arguments as ``attention_kernel.attend`` has them, but strides of q, out and pages count 16-byte pieces, pages
    have ``1 << shift`` entries, and ``items`` is how many there are.
    """
    query = (
        gl.allocate_shared_memory(gl.bfloat16, [64, 128], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [64, 128], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [64, 128], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [64, 64], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [64, 64], SWIZZLED),
    )
    keys = (
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, 128], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, 128], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, 128], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, 64], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, 64], SWIZZLED),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], PLAIN),
    )
    hand = (
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, BLOCK], SWIZZLED),
        gl.allocate_shared_memory(gl.float32, [STAGES, 64], PLAIN),
        gl.allocate_shared_memory(gl.float32, [64], PLAIN),
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    finished = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    seen = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(taken.index(i), count=1)
    mbarrier.init(finished, count=1)
    mbarrier.init(seen, count=1)
    fence_async_shared()
    thread_barrier()
    rows = (lengths, extra_lengths, width, extra_width, given, seq, first_row, splits)
    words = cache.to(gl.pointer_type(gl.int32), bitcast=True)
    extra_words = extra_cache.to(gl.pointer_type(gl.int32), bitcast=True)
    lists = (
        words, extra_words, shift, extra_shift, stride, extra_stride, capacity, extra_capacity,
    )  # fmt: skip
    strides = (q_b, q_s, q_h)
    output = (out, o_b, o_s, o_h)
    lse_output = (lse, l_b, l_s, l_h)
    indices = (index, extra_index, i_b, i_s, e_b, e_s)
    bars = (full, empty)
    hand_bars = (ready, taken, finished, seen)
    heads = HEAD_BLOCKS * 64
    gl.warp_specialize(
        [
            (
                left,
                (
                    q, strides, output, lse_output, sink, rows, scale, heads, partial, splits, query, keys, hand, bars,
                    hand_bars, items, SPLIT, HEAD_BLOCKS, SPLIT_BLOCKS,
                ),
            ),
            (
                right,
                (
                    output, rows, heads, partial, splits, keys, hand, bars, hand_bars, items,
                    SPLIT, HEAD_BLOCKS, SPLIT_BLOCKS,
                ),
            ),
            (producer, (rows, lists, indices, keys, bars, items, SPLIT, HEAD_BLOCKS, SPLIT_BLOCKS)),
        ],
        [4, 8],
        [RIGHT_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
