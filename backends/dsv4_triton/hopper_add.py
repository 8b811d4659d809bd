# ruff: noqa: N803, RUF059 - constexpr names are upper case, and Gluon compiles a subset of Python
"""Few rows, the second of two kernels: weights times keys over all blocks of a row, a few columns a program.

It is launched beside the first one, and fetches and decodes keys while that one is still at work.
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

from dsv4_triton.hopper_items import offset_of, row_lengths
from dsv4_triton.hopper_keys import put, put_decoded, words_of
from dsv4_triton.hopper_layouts import (
    BLOCK,
    MOST_BLOCKS,
    ONE,
    ONE_8,
    OUT_64,
    OUT_128,
    PIECES_8,
    PLAIN,
    PLAIN_2D,
    SWIZZLED,
    WEIGHTS_8,
    WORDS_8,
    thread_barrier,
    wait_for_previous,
)
from dsv4_triton.hopper_notes import locate, slots_of
from dsv4_triton.hopper_softmax import power, scaled
from dsv4_triton.hopper_weigh import KEYS, PLACES, block_at, group_factors
from dsv4_triton.numerics import LN2, LOG2E


#: blocks of keys that shared memory holds, by columns
STAGES = {64: 16, 128: 8}
#: blocks of weights that are on their way
RING = 8


@gluon.jit
def _fetch(at, slice_, COLUMNS: gl.constexpr):
    """Words of a block's keys that the columns need: 64 bytes for each 64 of them, for the last 64 of a key 128.

    Zeros stand for words that are not needed: a copy of others in their place would be waited for.
    """
    first = slice_ * (COLUMNS // 64)
    a = words_of(at, first, PIECES_8, WORDS_8)
    b = gl.full([BLOCK, 16], 0, gl.int32, WORDS_8)
    c = gl.full([BLOCK, 16], 0, gl.int32, WORDS_8)
    if COLUMNS == 128:
        b = words_of(at, first + 1, PIECES_8, WORDS_8)
    if slice_ == 512 // COLUMNS - 1:
        c = words_of(at, 8, PIECES_8, WORDS_8)
    return a, b, c


@gluon.jit
def _put_columns(tile, x, codes, valid, slice_, COLUMNS: gl.constexpr):
    a, b, c = x
    counts = gl.expand_dims(valid, 1)
    flags = gl.full([BLOCK, 16], 0, gl.int32, WORDS_8)
    if COLUMNS == 128:
        put_decoded(tile, 0, a, group_factors(codes, valid, 2 * slice_), flags, True)
        if slice_ == 3:
            put(tile, gl.where(counts, b, 0), 64)
            put(tile, gl.where(counts, c, 0), 96)
        else:
            put_decoded(tile, 64, b, group_factors(codes, valid, 2 * slice_ + 1), flags, True)
    elif slice_ == 7:
        put(tile, gl.where(counts, a, 0), 0)
        put(tile, gl.where(counts, c, 0), 32)
    else:
        put_decoded(tile, 0, a, group_factors(codes, valid, slice_), flags, True)


@gluon.jit
def _turn(row, lists, tiles, bars, x, codes, valid, slots, block, slice_, STAGES: gl.constexpr, COLUMNS: gl.constexpr):
    """A block into its stage, the words of the one four on asked for, and the slots of the one eight on."""
    full, empty = bars
    if block < row[2]:
        stage = block % STAGES
        mbarrier.wait(empty.index(stage), ((block // STAGES) & 1) ^ 1)
        _put_columns(tiles.index(stage), x, codes, valid, slice_, COLUMNS)
        mbarrier.arrive(full.index(stage), count=1)
    place, codes, valid = locate(lists, block_at(row, block + 4), slots, KEYS)
    x = _fetch(gl.convert_layout(place, PLACES, assert_trivial=True), slice_, COLUMNS)
    return x, codes, valid, slots_of(block_at(row, block + 8), KEYS)


@gluon.jit
def _first(row, lists, block, slots, slice_, COLUMNS: gl.constexpr):
    place, codes, valid = locate(lists, block_at(row, block), slots, KEYS)
    return _fetch(gl.convert_layout(place, PLACES, assert_trivial=True), slice_, COLUMNS), codes, valid


@gluon.jit
def _gather(row, lists, tiles, bars, slice_, STAGES: gl.constexpr, COLUMNS: gl.constexpr):
    """Columns of all keys of a row, four blocks on their way. Written out, as moved registers would be waited for."""
    zero = row[2] * 0
    slots_a, slots_b = slots_of(block_at(row, zero), KEYS), slots_of(block_at(row, zero + 1), KEYS)
    slots_c, slots_d = slots_of(block_at(row, zero + 2), KEYS), slots_of(block_at(row, zero + 3), KEYS)
    x_a, codes_a, valid_a = _first(row, lists, zero, slots_a, slice_, COLUMNS)
    x_b, codes_b, valid_b = _first(row, lists, zero + 1, slots_b, slice_, COLUMNS)
    x_c, codes_c, valid_c = _first(row, lists, zero + 2, slots_c, slice_, COLUMNS)
    x_d, codes_d, valid_d = _first(row, lists, zero + 3, slots_d, slice_, COLUMNS)
    slots_a, slots_b = slots_of(block_at(row, zero + 4), KEYS), slots_of(block_at(row, zero + 5), KEYS)
    slots_c, slots_d = slots_of(block_at(row, zero + 6), KEYS), slots_of(block_at(row, zero + 7), KEYS)
    for block in range(0, row[2], 4):
        x_a, codes_a, valid_a, slots_a = _turn(
            row, lists, tiles, bars, x_a, codes_a, valid_a, slots_a, block, slice_, STAGES, COLUMNS
        )
        x_b, codes_b, valid_b, slots_b = _turn(
            row, lists, tiles, bars, x_b, codes_b, valid_b, slots_b, block + 1, slice_, STAGES, COLUMNS
        )
        x_c, codes_c, valid_c, slots_c = _turn(
            row, lists, tiles, bars, x_c, codes_c, valid_c, slots_c, block + 2, slice_, STAGES, COLUMNS
        )
        x_d, codes_d, valid_d, slots_d = _turn(
            row, lists, tiles, bars, x_d, codes_d, valid_d, slots_d, block + 3, slice_, STAGES, COLUMNS
        )


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _join(lse, l_h, sink, given, blocks, slice_, stats, charts, rises_at, scales, bars):
    """How blocks are joined: a factor of each and of what came before it, then what divides the sums, and the lse."""
    charted, summed = bars
    # [heads, blocks]
    layout: gl.constexpr = gl.BlockedLayout([1, MOST_BLOCKS // 2], [16, 2], [4, 1], [1, 0])
    heads: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    h = gl.arange(0, 64, heads)
    sinks = gl.load(sink + h, mask=(h >= 0) & ((given & 4) != 0), other=float("-inf"))
    row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
    column = gl.expand_dims(gl.arange(0, MOST_BLOCKS, gl.SliceLayout(0, layout)), 0)
    here = (column < blocks) & (row >= 0)
    at = stats + (row + column * 192)
    wait_for_previous()
    block_tops = gl.load(at, mask=here, other=float("-inf"))
    before = gl.associative_scan(gl.load(at - 192, mask=here & (column > 0), other=float("-inf")), 1, _larger)
    tops = gl.maximum(before, block_tops)
    shifts = gl.where(tops == float("-inf"), 0.0, tops)
    charts[0].index(0).store(gl.permute(power(block_tops - shifts), (1, 0)))
    charts[1].index(0).store(gl.permute(power(before - shifts), (1, 0)))
    # a bit for each block that raises a maximum
    rises = gl.where((column > 0) & (block_tops > before), 1, 0) << column
    rises_at.store(gl.full([1], 0, gl.int32, ONE) + gl.reduce_or(gl.reduce_or(rises, 1), 0))
    mbarrier.arrive(charted, count=1)
    charts[2].index(0).store(gl.permute(gl.load(at + 64, mask=here, other=0.0), (1, 0)))
    charts[3].index(0).store(gl.permute(gl.load(at + 128, mask=here, other=0.0), (1, 0)))
    top = gl.convert_layout(gl.max(tops, 1), heads)
    rounded = gl.zeros([64], gl.float32, heads)
    total = rounded
    for i in range(0, blocks):
        factor, keep = _row(charts[0], i).load(heads), _row(charts[1], i).load(heads)
        rounded = rounded * keep + _row(charts[2], i).load(heads) * factor
        total = total * keep + _row(charts[3], i).load(heads) * factor
    # a sum of 0 tells an empty row and is false for NaN: a poisoned row must not come out as zeros
    vacant = total == 0.0
    weight = gl.exp2(sinks * LOG2E - gl.where(vacant, 0.0, top))
    scales.store(gl.where(vacant, 0.0, 1.0 / (gl.where(vacant, 1.0, rounded) + weight)))
    mbarrier.arrive(summed, count=1)
    if slice_ == 0:
        row_lse = gl.where(vacant, float("inf"), (top + gl.log2(gl.where(vacant, 1.0, total))) * LN2)
        gl.store(lse + h.to(gl.int64) * l_h, row_lse)


@gluon.jit
def _row(chart, block):
    """What a chart has of a block: [64 heads]."""
    return chart.index(0)._reinterpret(gl.float32, [MOST_BLOCKS, 64], PLAIN).index(block)


@gluon.jit
def _copy_weights(weights, ring, block, blocks, RING: gl.constexpr):
    """Weights of a block on their way into shared memory, as they lie in memory; behind the last, of the last."""
    held = gl.maximum(gl.minimum(block, blocks - 1), 0)
    at = held * 4096 + gl.arange(0, 4096, WEIGHTS_8)
    async_copy.async_copy_global_to_shared(ring.index(block % RING), weights + at)
    async_copy.commit_group()


@gluon.jit
def _operand(ring, charts, block, RING: gl.constexpr, OPERAND: gl.constexpr):
    """Weights of a block [heads, keys] as first operand, times the block's factor for each head."""
    # keys: 16s; heads: 16s, 1s; keys: 2s, 8s; heads: 8s; keys: 1s
    x = gl.reshape(ring.index(block % RING).load(WEIGHTS_8), [4, 4, 8, 4, 2, 2, 2])
    x = gl.reshape(gl.permute(x, (1, 5, 2, 0, 4, 3, 6)), [64, BLOCK])
    x = gl.convert_layout(x, OPERAND, assert_trivial=True)
    return scaled(x, _row(charts[0], block % MOST_BLOCKS).load(gl.SliceLayout(1, OPERAND)))


@gluon.jit
def _sums(
    out, o_h, blocks, slice_, weights, tiles, ring, charts, rises_at, scales, bars,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    full, empty, charted, summed = bars
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, COLUMNS // 2, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    acc = gl.zeros([64, COLUMNS], gl.float32, layout)
    wait_for_previous()
    for j in gl.static_range(RING):
        _copy_weights(weights, ring, blocks * 0 + j, blocks, RING)
    mbarrier.wait(charted, 0)
    rises = gl.max(rises_at.load(ONE_8), 0)
    async_copy.wait_group(RING - 1)
    thread_barrier()
    p = _operand(ring, charts, blocks * 0, RING, operand)
    ready = blocks * 0
    for i in range(0, blocks):
        stage = i % STAGES
        if i >= ready:
            # One fence for as many blocks as there may be.
            next_ready = gl.minimum(gl.where(i == 0, STAGES, i + 1), blocks)
            while ready < next_ready:
                mbarrier.wait(full.index(ready % STAGES), (ready // STAGES) & 1)
                ready += 1
            fence_async_shared()
            thread_barrier()
        if ((rises >> i) & 1) != 0:
            acc = acc * gl.expand_dims(_row(charts[1], i).load(rows), 1)
        token = warpgroup_mma(p, tiles.index(stage), acc, is_async=True)
        async_copy.wait_group(RING - 2)
        thread_barrier()
        next_p = _operand(ring, charts, i + 1, RING, operand)
        acc, p = warpgroup_mma_wait(0, deps=[token, p])
        p = next_p
        mbarrier.arrive(empty.index(stage), count=1)
        _copy_weights(weights, ring, i + RING, blocks, RING)
    async_copy.wait_group(0)
    mbarrier.wait(summed, 0)
    scale = scales.load(rows)
    out_rows: gl.constexpr = OUT_128 if COLUMNS == 128 else OUT_64
    staged = tiles.index(0)
    staged.store((acc * gl.expand_dims(scale, 1)).to(gl.bfloat16))
    y = staged.load(out_rows)
    h = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, out_rows)), 1)
    column = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, out_rows)), 0) + slice_ * COLUMNS
    gl.store(out + (h * (o_h * 8) + column), y)


@gluon.jit(do_not_specialize=[
    "seq", "o_b", "o_s", "o_h", "l_b", "l_s", "l_h", "i_b", "i_s", "e_b", "e_s", "width", "extra_width", "given",
    "shift", "extra_shift", "stride", "extra_stride", "capacity", "extra_capacity", "row_blocks", "halves",
], do_not_specialize_on_alignment=["lse", "sink", "index", "lengths", "extra_index", "extra_lengths"])  # fmt: skip
def add_blocks(
    out, o_b, o_s, o_h, lse, l_b, l_s, l_h, sink, seq, row_blocks, halves,
    cache, shift, stride, capacity, index, i_b, i_s, lengths, width,
    extra_cache, extra_shift, extra_stride, extra_capacity, extra_index, e_b, e_s, extra_lengths, extra_width,
    given, weights, stats, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    RING: gl.constexpr, GATHER_REGISTERS: gl.constexpr, JOIN_REGISTERS: gl.constexpr,
):  # fmt: skip
    """COLUMNS columns of the output of 64 heads of a row; the first program of these also has their lse.

    Arguments as ``hopper_weigh.weigh_blocks`` has them. A row has MOST_BLOCKS blocks at most.
    """
    slices: gl.constexpr = 512 // COLUMNS
    item = gl.program_id(0) // slices
    slice_ = gl.program_id(0) % slices
    row, half = item // halves, item % halves
    b, s = row // seq, row % seq
    n, extra = row_lengths((lengths, extra_lengths, width, extra_width, given), b)
    blocks = (n + BLOCK - 1) // BLOCK + (extra + BLOCK - 1) // BLOCK
    held = (n, extra, blocks, index + offset_of(b, i_b, s, i_s), extra_index + offset_of(b, e_b, s, e_s))
    words = cache.to(gl.pointer_type(gl.int32), bitcast=True)
    extra_words = extra_cache.to(gl.pointer_type(gl.int32), bitcast=True)
    lists = (words, extra_words, shift, extra_shift, stride, extra_stride, capacity, extra_capacity)
    weights += item.to(gl.int64) * row_blocks * 4096
    stats += item.to(gl.int64) * row_blocks * 192
    out += (offset_of(b, o_b, s, o_s) + half.to(gl.int64) * 64 * o_h) * 8
    lse += offset_of(b, l_b, s, l_s) + half.to(gl.int64) * 64 * l_h
    sink += half * 64
    tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, COLUMNS], SWIZZLED)
    ring = gl.allocate_shared_memory(gl.bfloat16, [RING, 4096], PLAIN)
    # of each block and head: its factor, that of what came before, the sums of weights as rounded, and not
    charts = (
        gl.allocate_shared_memory(gl.float32, [1, MOST_BLOCKS, 64], PLAIN_2D),
        gl.allocate_shared_memory(gl.float32, [1, MOST_BLOCKS, 64], PLAIN_2D),
        gl.allocate_shared_memory(gl.float32, [1, MOST_BLOCKS, 64], PLAIN_2D),
        gl.allocate_shared_memory(gl.float32, [1, MOST_BLOCKS, 64], PLAIN_2D),
    )
    rises_at = gl.allocate_shared_memory(gl.int32, [1], PLAIN)
    scales = gl.allocate_shared_memory(gl.float32, [64], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    charted = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(charted, count=1)
    mbarrier.init(summed, count=1)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (
                _sums,
                (
                    out, o_h, blocks, slice_, weights, tiles, ring, charts, rises_at, scales,
                    (full, empty, charted, summed), COLUMNS, STAGES, RING,
                ),
            ),
            (_gather, (held, lists, tiles, (full, empty), slice_, STAGES, COLUMNS)),
            (
                _join,
                (lse, l_h, sink, given, blocks, slice_, stats, charts, rises_at, scales, (charted, summed)),
            ),
        ],
        [8, 4],
        [GATHER_REGISTERS, JOIN_REGISTERS],
    )  # fmt: skip
