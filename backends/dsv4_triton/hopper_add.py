# ruff: noqa: N803, RUF005, RUF059 - constexpr names are upper case, and Gluon compiles a subset of Python
"""Few rows, the second of two kernels: softmax over all blocks of a row, weights times keys, a few columns a program.

It is launched beside the first one, and has decoded its columns of all keys of the row before that one is done. Two
roles of four warps do so, and then make weights of scores, each of every second block; four warps add up.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4_triton.hopper_emit import emit
from dsv4_triton.hopper_items import offset_of, row_of
from dsv4_triton.hopper_keys import decoded, words_of
from dsv4_triton.hopper_layouts import (
    BLOCK,
    MOST_BLOCKS,
    PIECES,
    PIECES_32,
    PLAIN,
    SCORES,
    STORED_SCORES,
    WEIGHTS,
    WORDS,
    WORDS_32,
    thread_barrier,
    wait_for_previous,
)
from dsv4_triton.hopper_notes import address_of, entries_of, factors_of, lists_of
from dsv4_triton.hopper_score import restored_scores
from dsv4_triton.hopper_softmax import weigh

FIRST = gl.constexpr(0)
SECOND = gl.constexpr(1)


@gluon.jit
def _fill(row, lists, tiles, slice_, first, steps, COLUMNS: gl.constexpr, ROPE: gl.constexpr, AT_ONCE: gl.constexpr):
    """Columns of AT_ONCE steps of keys, every second from step ``first``, into shared memory."""
    words: gl.constexpr = WORDS_32 if COLUMNS == 32 else WORDS
    pieces: gl.constexpr = PIECES_32 if COLUMNS == 32 else PIECES
    key_layout: gl.constexpr = gl.SliceLayout(1, words)
    place_layout: gl.constexpr = gl.SliceLayout(1, pieces)
    keys: gl.constexpr = words.shape[0]
    slots = ()
    for j in gl.static_range(AT_ONCE):
        slots = slots + (entries_of(row, first + 2 * j, key_layout, keys),)
    x = ()
    codes = ()
    counts = ()
    # bytes of e4m3, one a column, or of rope, two a column
    at = slice_ * COLUMNS
    if ROPE:
        at = 448 + (slice_ - 448 // COLUMNS) * (2 * COLUMNS)
    for j in gl.static_range(AT_ONCE):
        slot, main, inside = slots[j]
        place, code, valid = address_of(lists, slot, main, inside)
        place = gl.convert_layout(place, place_layout, assert_trivial=True)
        counts = counts + (valid,)
        if ROPE:
            x = x + (words_of(place, at, pieces, words), words_of(place, at + COLUMNS, pieces, words))
        else:
            codes = codes + (code,)
            x = x + (words_of(place, at, pieces, words),)
    for j in gl.static_range(AT_ONCE):
        if first + 2 * j < steps:
            tile = tiles.index(first + 2 * j)
            if ROPE:
                here = gl.expand_dims(counts[j], 1)
                tile.slice(0, COLUMNS // 4, 1).store(gl.where(here, x[2 * j], 0))
                tile.slice(COLUMNS // 4, COLUMNS // 4, 1).store(gl.where(here, x[2 * j + 1], 0))
            else:
                byte = (codes[j] >> (8 * (slice_ * COLUMNS // 64)).to(gl.int64)).to(gl.int32) & 255
                pairs, flags = decoded(x[j], gl.where(counts[j], factors_of(byte), 0), x[j] * 0, True)
                tile.store(pairs)


@gluon.jit
def _prepare(
    TURN: gl.constexpr, row, lists, tiles, slice_, scores, tops, scale, ring, hand, bars,
    COLUMNS: gl.constexpr, RING: gl.constexpr, AT_ONCE: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """A role of four warps: half of the keys, then weights of every second block.

    AT_ONCE steps of keys, and later AHEAD blocks of scores, are on their way at once.
    """
    filled, full, empty = bars
    blocks = row[2]
    keys: gl.constexpr = 4096 // COLUMNS
    steps = (blocks * BLOCK + keys - 1) // keys
    if slice_ >= 448 // COLUMNS:
        for step in range(TURN, steps, 2 * AT_ONCE):
            _fill(row, lists, tiles, slice_, step, steps, COLUMNS, True, AT_ONCE)
    else:
        for step in range(TURN, steps, 2 * AT_ONCE):
            _fill(row, lists, tiles, slice_, step, steps, COLUMNS, False, AT_ONCE)
    mbarrier.arrive(filled, count=1)
    wait_for_previous()
    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    for i in range(TURN, blocks, 2 * AHEAD):
        held = ()
        for j in gl.static_range(AHEAD):
            held = held + (_scores_of(scores, tops, i + 2 * j, blocks),)
        for j in gl.static_range(AHEAD):
            top = _hand_over(held[j], top, i + 2 * j, blocks, scale, ring, hand, full, empty, RING)


@gluon.jit
def _scores_of(scores, tops, block, blocks):
    """Scores of a block as they lie in memory, its maxima, those of the block before; behind the last, of the last."""
    held = gl.minimum(block, blocks - 1)
    heads = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    before = gl.load(tops + (gl.maximum(held - 1, 0) * 64 + heads))
    return (
        gl.load(scores + (held * 4096 + gl.arange(0, 4096, STORED_SCORES))),
        gl.load(tops + (held * 64 + heads)),
        before,
    )


@gluon.jit
def _hand_over(held, top, block, blocks, scale, ring, hand, full, empty, RING: gl.constexpr):
    """A block's weights under the maximum so far, the factor of what came before, and their sum; the new maximum."""
    stored, block_top, before = held
    if block < blocks:
        if block > 0:
            top = gl.maximum(top, before)
        p, keep, top = weigh(restored_scores(stored), scale, top, block_top)
        slot = block % RING
        mbarrier.wait(empty.index(slot), ((block // RING) & 1) ^ 1)
        x = gl.reshape(p.to(gl.bfloat16), [4, 2, 8, 4, 2, 4, 2])  # heads: 16s, 8s, 1s; keys: 16s, 8s, 2s, 1s
        x = gl.reshape(gl.permute(x, (3, 0, 2, 5, 4, 1, 6)), [4096])
        ring.index(slot).store(gl.convert_layout(x, WEIGHTS, assert_trivial=True))
        hand[0].index(slot).store(keep)
        hand[1].index(slot).store(top)
        hand[2].index(slot).store(gl.sum(p, 1))
        mbarrier.arrive(full.index(slot), count=1)
    return top


@gluon.jit
def _operand(x, OPERAND: gl.constexpr):
    """Weights as they lie in shared memory as wgmma's first operand."""
    x = gl.reshape(x, [4, 4, 8, 4, 2, 2, 2])  # keys: 16s; heads: 16s, 1s; keys: 2s, 8s; heads: 8s; keys: 1s
    x = gl.reshape(gl.permute(x, (1, 5, 2, 0, 4, 3, 6)), [64, BLOCK])
    return gl.convert_layout(x, OPERAND, assert_trivial=True)


@gluon.jit
def _sums(
    output, half, blocks, slice_, tiles, ring, hand, bars,
    COLUMNS: gl.constexpr, RING: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """The role of four warps: weights times keys, and the output."""
    filled, full, empty = bars
    keeps, tops, sums = hand
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    acc = gl.zeros([64, COLUMNS], gl.float32, layout)
    total = gl.zeros([64], gl.float32, rows)
    top = total
    mbarrier.wait(filled, 0)
    fence_async_shared()
    thread_barrier()
    if blocks > 0:
        mbarrier.wait(full.index(0), 0)
        p = _operand(ring.index(0).load(WEIGHTS), operand)
        for i in range(blocks):
            slot = i % RING
            keep = keeps.index(slot).load(rows)
            acc = acc * gl.expand_dims(keep, 1)
            token = warpgroup_mma(p, tiles.index(i), acc, is_async=True)
            total = gl.fma(total, keep, sums.index(slot).load(rows))
            top = tops.index(slot).load(rows)
            mbarrier.arrive(empty.index(slot), count=1)
            after = gl.minimum(i + 1, blocks - 1)
            mbarrier.wait(full.index(after % RING), (after // RING) & 1)
            next_p = _operand(ring.index(after % RING).load(WEIGHTS), operand)
            acc, p = warpgroup_mma_wait(0, deps=[token, p])
            p = next_p
    emit(acc, top, total, output, half, slice_, layout, SPLIT)


@gluon.jit(do_not_specialize=[
    "seq", "o_b", "o_s", "o_h", "l_b", "l_s", "l_h", "i_b", "i_s", "e_b", "e_s", "width", "extra_width", "given",
    "shift", "extra_shift", "stride", "extra_stride", "capacity", "extra_capacity", "row_blocks", "splits", "halves",
], do_not_specialize_on_alignment=[
    "lse", "partial", "sink", "index", "lengths", "extra_index", "extra_lengths",
])  # fmt: skip
def add_blocks(
    out, o_b, o_s, o_h, lse, l_b, l_s, l_h, sink, seq, row_blocks, splits, partial, halves,
    cache, shift, stride, capacity, index, i_b, i_s, lengths, width,
    extra_cache, extra_shift, extra_stride, extra_capacity, extra_index, e_b, e_s, extra_lengths, extra_width,
    given, scores, tops, scale, SPLIT: gl.constexpr, COLUMNS: gl.constexpr, RING: gl.constexpr, AT_ONCE: gl.constexpr,
    AHEAD: gl.constexpr, PREPARE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """COLUMNS columns of the output of 64 heads of a row; the first program of these also has their lse.

    Arguments as ``hopper_score.score_blocks`` has them, and ``hopper_kernel.attend``. An item has MOST_BLOCKS blocks at
    most, whose keys are in shared memory beside RING blocks of weights.
    """
    slices: gl.constexpr = 512 // COLUMNS
    item = gl.program_id(0) // slices
    slice_ = gl.program_id(0) % slices
    number, half = item // halves, item % halves
    b, s, split, row_splits, held = row_of(
        number, seq, splits, (lengths, extra_lengths, width, extra_width, given),
        (index, extra_index, i_b, i_s, e_b, e_s), SPLIT, MOST_BLOCKS,
    )  # fmt: skip
    blocks = held[2]
    lists = lists_of(cache, shift, stride, capacity, extra_cache, extra_shift, extra_stride, extra_capacity)
    scores += item.to(gl.int64) * row_blocks * 4096
    tops += item.to(gl.int64) * row_blocks * 64
    output = (
        out + offset_of(b, o_b, s, o_s) * 8, o_h, lse + offset_of(b, l_b, s, l_s), l_h, sink, given,
        partial, number, halves * 64, split, row_splits,
    )  # fmt: skip
    swizzle: gl.constexpr = 2 * COLUMNS
    keys_a_step: gl.constexpr = 4096 // COLUMNS  # 16 bytes of e4m3 a thread
    tiles = gl.allocate_shared_memory(gl.bfloat16, [MOST_BLOCKS, BLOCK, COLUMNS], gl.NVMMASharedLayout(swizzle, 16, 2))
    words_of_tiles = tiles._reinterpret(
        gl.int32, [MOST_BLOCKS * BLOCK // keys_a_step, keys_a_step, COLUMNS // 2], gl.NVMMASharedLayout(swizzle, 32, 2)
    )
    ring = gl.allocate_shared_memory(gl.bfloat16, [RING, 4096], PLAIN)
    # of each block: the factor of what came before, the maximum with it, the sum of its weights
    hand = (
        gl.allocate_shared_memory(gl.float32, [RING, 64], PLAIN),
        gl.allocate_shared_memory(gl.float32, [RING, 64], PLAIN),
        gl.allocate_shared_memory(gl.float32, [RING, 64], PLAIN),
    )
    filled = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    mbarrier.init(filled, count=2)
    for i in gl.static_range(RING):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    thread_barrier()
    bars = (filled, full, empty)
    gl.warp_specialize(
        [
            (
                _sums,
                (output, half, blocks, slice_, tiles, ring, hand, bars, COLUMNS, RING, SPLIT),
            ),
            (
                _prepare,
                (
                    FIRST, held, lists, words_of_tiles, slice_, scores, tops, scale, ring, hand, bars, COLUMNS, RING,
                    AT_ONCE, AHEAD,
                ),
            ),
            (
                _prepare,
                (
                    SECOND, held, lists, words_of_tiles, slice_, scores, tops, scale, ring, hand, bars, COLUMNS, RING,
                    AT_ONCE, AHEAD,
                ),
            ),
        ],
        [4, 4],
        [PREPARE_REGISTERS, PREPARE_REGISTERS],
    )  # fmt: skip
