# ruff: noqa: N803, RUF005, SIM102, SIM113 - constexpr names are upper case, and Gluon compiles a subset of Python
"""Dozens of rows, the second of two kernels: softmax over a row's blocks, weights times keys, 128 columns a program.

As ``hopper_add`` does it for a few rows, but for all heads of a row at once, and with keys that pass through a ring of
blocks: eight warps fetch and decode them, two roles of four make weights (every second block or, with 128 heads, half
of the heads), one adds up.
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

from dsv4_triton.hopper_emit import emit
from dsv4_triton.hopper_fetch import copy_group, slot_factors
from dsv4_triton.hopper_items import offset_of, row_of
from dsv4_triton.hopper_keys import put, put_decoded
from dsv4_triton.hopper_layouts import (
    BLOCK,
    MOST_BLOCKS,
    PLAIN,
    PLAIN_2D,
    SCORES,
    STORED_SCORES,
    SUMS,
    SWIZZLED,
    WORDS_8,
    thread_barrier,
    wait_for_previous,
)
from dsv4_triton.hopper_notes import address_of, entries_of, lists_of
from dsv4_triton.hopper_score import restored_scores
from dsv4_triton.hopper_softmax import weigh

FIRST = gl.constexpr(0)
SECOND = gl.constexpr(1)
KEYS = gl.constexpr(gl.SliceLayout(1, WORDS_8))
#: all keys of a row, 256 at a time
NOTING = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
#: slices of 128 columns
SLICES = gl.constexpr(4)


@gluon.jit
def _note(row, lists, notes, slice_):
    """Where all keys of a row are, and the factors of both groups of a slice's columns; 0 for keys that do not count.

    Of rope the factors say no more than that.
    """
    places, factors, others = notes
    steps: gl.constexpr = places.shape[0]
    found = ()
    for j in gl.static_range(steps):
        found = found + (entries_of(row, slice_ * 0 + j, NOTING, 256),)
    located = ()
    for j in gl.static_range(steps):
        entry, main, inside = found[j]
        located = located + (address_of(lists, entry, main, inside),)
    for j in gl.static_range(steps):
        place, codes, valid = located[j]
        places.index(j).store(place)
        factors.index(j).store(slot_factors(codes, valid, 2 * slice_))
        other = slot_factors(codes, valid, 2 * slice_ + 1)
        others.index(j).store(gl.where(slice_ == SLICES - 1, gl.where(valid, 1, 0), other))


@gluon.jit
def _ask(places, ring, block, slice_):
    """Copies of a block's groups of a slice on their way."""
    slots: gl.constexpr = ring.shape[0] // 3
    slot = block % slots
    place = places.index(block).load(KEYS)
    copy_group(place, 2 * slice_, ring.index(3 * slot), WORDS_8)
    copy_group(place, 2 * slice_ + 1, ring.index(3 * slot + 1), WORDS_8)
    if slice_ == SLICES - 1:
        copy_group(place, 8, ring.index(3 * slot + 2), WORDS_8)


@gluon.jit
def _keys(row, lists, ring, notes, tiles, bars, slice_):
    """The role of eight warps: raw bytes of a slice's columns, some blocks ahead, and from them bf16.

    These are two groups of 64 bytes; the last slice has one of e4m3 and two of rope.
    """
    full, empty = bars
    blocks = row[2]
    slots: gl.constexpr = ring.shape[0] // 3
    stages: gl.constexpr = tiles.shape[0]
    _note(row, lists, notes, slice_)
    places = notes[0]._reinterpret(gl.int64, [MOST_BLOCKS, BLOCK], PLAIN)
    factors = notes[1]._reinterpret(gl.int32, [MOST_BLOCKS, BLOCK], PLAIN)
    others = notes[2]._reinterpret(gl.int32, [MOST_BLOCKS, BLOCK], PLAIN)
    for block in gl.static_range(slots - 1):
        if block < blocks:
            _ask(places, ring, slice_ * 0 + block, slice_)
        async_copy.commit_group()
    for block in range(blocks):
        slot = block % slots
        stage = block % stages
        if block + slots - 1 < blocks:
            _ask(places, ring, block + slots - 1, slice_)
        async_copy.commit_group()
        async_copy.wait_group(slots - 1)
        factor = factors.index(block).load(KEYS)
        other = others.index(block).load(KEYS)
        x = ring.index(3 * slot).load(WORDS_8)
        y = ring.index(3 * slot + 1).load(WORDS_8)
        mbarrier.wait(empty.index(stage), ((block // stages) & 1) ^ 1)
        tile = tiles.index(stage)
        flags = gl.full([BLOCK, 16], 0, gl.int32, WORDS_8)
        flags = put_decoded(tile, 0, x, factor, flags, True)
        if slice_ == SLICES - 1:
            counts = gl.expand_dims(other != 0, 1)
            put(tile, gl.where(counts, y, 0), 64)
            put(tile, gl.where(counts, ring.index(3 * slot + 2).load(WORDS_8), 0), 96)
        else:
            flags = put_decoded(tile, 64, y, other, flags, True)
        thread_barrier()
        mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def _weigh(
    TURN: gl.constexpr, blocks, row_blocks, scores, tops, scale, brought, weights, hand, bars,
    HEAD_BLOCKS: gl.constexpr,
):  # fmt: skip
    """A role of four warps: weights of every second block (64 heads), or of 64 heads (128 heads).

    brought: fp32 ``[4, 4096]``, the scores of a block and of the one behind it for each of the two roles.
    """
    ready, used = bars
    keeps, maxima, sums = hand
    half: gl.constexpr = TURN if HEAD_BLOCKS == 2 else 0
    step: gl.constexpr = 3 - HEAD_BLOCKS
    depth: gl.constexpr = weights.shape[0] // HEAD_BLOCKS
    scores += half * row_blocks.to(gl.int64) * 4096
    tops += half * row_blocks.to(gl.int64) * 64
    heads = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    wait_for_previous()
    first = TURN - half
    at = gl.arange(0, 4096, STORED_SCORES)
    block_top = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    if first < blocks:
        async_copy.async_copy_global_to_shared(brought.index(2 * TURN), scores + (first * 4096 + at))
        block_top = gl.load(tops + (first * 64 + heads))
    async_copy.commit_group()
    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    done = 0
    for block in range(first, blocks, step):
        after = gl.minimum(block + step, blocks - 1)
        async_copy.async_copy_global_to_shared(brought.index(2 * TURN + ((done + 1) & 1)), scores + (after * 4096 + at))
        async_copy.commit_group()
        next_top = gl.load(tops + (after * 64 + heads))
        if step == 2:
            before = gl.load(tops + (gl.maximum(block - 1, 0) * 64 + heads))
        async_copy.wait_group(1)
        stored = brought.index(2 * TURN + (done & 1)).load(STORED_SCORES)
        if step == 2:
            if block > 0:
                top = gl.maximum(top, before)
        p, keep, top = weigh(restored_scores(stored), scale, top, block_top)
        entry = half * depth + block % depth
        mbarrier.wait(used.index(entry), ((block // depth) & 1) ^ 1)
        weights.index(entry).store(p.to(gl.bfloat16))
        keeps.index(entry).store(keep)
        maxima.index(entry).store(top)
        sums.index(entry).store(gl.sum(p, 1))
        thread_barrier()
        mbarrier.arrive(ready.index(entry), count=1)
        block_top = next_top
        done += 1
    async_copy.wait_group(0)


@gluon.jit
def _sums(
    output, blocks, slice_, tiles, weights, hand, bars, HEAD_BLOCKS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """The role of four warps: weights times keys of every 64 heads, and the output."""
    full, empty, ready, used = bars
    keeps, maxima, sums = hand
    stages: gl.constexpr = tiles.shape[0]
    depth: gl.constexpr = weights.shape[0] // HEAD_BLOCKS
    rows: gl.constexpr = gl.SliceLayout(1, SUMS)
    acc = ()
    total = ()
    top = ()
    for _ in gl.static_range(HEAD_BLOCKS):
        acc = acc + (gl.zeros([64, 128], gl.float32, SUMS),)
        total = total + (gl.zeros([64], gl.float32, rows),)
        top = top + (gl.zeros([64], gl.float32, rows),)
    for block in range(blocks):
        stage = block % stages
        mbarrier.wait(full.index(stage), (block // stages) & 1)
        tokens = ()
        new_total = ()
        new_top = ()
        for half in gl.static_range(HEAD_BLOCKS):
            entry = half * depth + block % depth
            mbarrier.wait(ready.index(entry), (block // depth) & 1)
            fence_async_shared()
            thread_barrier()
            keep = keeps.index(entry).load(rows)
            new_total = new_total + (gl.fma(total[half], keep, sums.index(entry).load(rows)),)
            new_top = new_top + (maxima.index(entry).load(rows),)
            scaled = acc[half] * gl.expand_dims(keep, 1)
            tokens = tokens + (warpgroup_mma(weights.index(entry), tiles.index(stage), scaled, is_async=True),)
        total = new_total
        top = new_top
        if HEAD_BLOCKS == 2:
            first, second = warpgroup_mma_wait(0, deps=[tokens[0], tokens[1]])
            acc = (first, second)
        else:
            acc = (warpgroup_mma_wait(0, deps=[tokens[0]]),)
        thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        for half in gl.static_range(HEAD_BLOCKS):
            mbarrier.arrive(used.index(half * depth + block % depth), count=1)
    for half in gl.static_range(HEAD_BLOCKS):
        emit(acc[half], top[half], total[half], output, half, slice_, SUMS, SPLIT)


@gluon.jit(do_not_specialize=[
    "seq", "o_b", "o_s", "o_h", "l_b", "l_s", "l_h", "i_b", "i_s", "e_b", "e_s", "width", "extra_width", "given",
    "shift", "extra_shift", "stride", "extra_stride", "capacity", "extra_capacity", "row_blocks", "splits",
], do_not_specialize_on_alignment=[
    "lse", "partial", "sink", "index", "lengths", "extra_index", "extra_lengths",
])  # fmt: skip
def add_stream(
    out, o_b, o_s, o_h, lse, l_b, l_s, l_h, sink, seq, row_blocks, splits, partial,
    cache, shift, stride, capacity, index, i_b, i_s, lengths, width,
    extra_cache, extra_shift, extra_stride, extra_capacity, extra_index, e_b, e_s, extra_lengths, extra_width,
    given, scores, tops, scale, SPLIT: gl.constexpr, HEAD_BLOCKS: gl.constexpr, SLOTS: gl.constexpr,
    STAGES: gl.constexpr, DEPTH: gl.constexpr, WEIGH_REGISTERS: gl.constexpr, KEYS_REGISTERS: gl.constexpr,
):  # fmt: skip
    """128 columns of the output of a row; the first program of a row also has its lse.

    Arguments as ``hopper_score.score_blocks`` has them, and ``hopper_kernel.attend``.
    """
    item = gl.program_id(0) // SLICES
    slice_ = gl.program_id(0) % SLICES
    b, s, split, row_splits, held = row_of(
        item, seq, splits, (lengths, extra_lengths, width, extra_width, given),
        (index, extra_index, i_b, i_s, e_b, e_s), SPLIT, MOST_BLOCKS,
    )  # fmt: skip
    blocks = held[2]
    lists = lists_of(cache, shift, stride, capacity, extra_cache, extra_shift, extra_stride, extra_capacity)
    scores += item.to(gl.int64) * row_blocks * (HEAD_BLOCKS * 4096)
    tops += item.to(gl.int64) * row_blocks * (HEAD_BLOCKS * 64)
    output = (
        out + offset_of(b, o_b, s, o_s) * 8, o_h, lse + offset_of(b, l_b, s, l_s), l_h, sink, given,
        partial, item, HEAD_BLOCKS * 64, split, row_splits,
    )  # fmt: skip
    tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, 128], SWIZZLED)
    weights = gl.allocate_shared_memory(gl.bfloat16, [HEAD_BLOCKS * DEPTH, 64, BLOCK], SWIZZLED)
    ring = gl.allocate_shared_memory(gl.int32, [3 * SLOTS, BLOCK, 16], PLAIN_2D)
    brought = gl.allocate_shared_memory(gl.float32, [4, 4096], PLAIN)
    notes = (
        gl.allocate_shared_memory(gl.int64, [MOST_BLOCKS // 4, 256], PLAIN),
        gl.allocate_shared_memory(gl.int32, [MOST_BLOCKS // 4, 256], PLAIN),
        gl.allocate_shared_memory(gl.int32, [MOST_BLOCKS // 4, 256], PLAIN),
    )
    # of each block: the factor of what came before, the maximum with it, the sum of its weights
    hand = (
        gl.allocate_shared_memory(gl.float32, [HEAD_BLOCKS * DEPTH, 64], PLAIN),
        gl.allocate_shared_memory(gl.float32, [HEAD_BLOCKS * DEPTH, 64], PLAIN),
        gl.allocate_shared_memory(gl.float32, [HEAD_BLOCKS * DEPTH, 64], PLAIN),
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [HEAD_BLOCKS * DEPTH, 1], mbarrier.MBarrierLayout())
    used = gl.allocate_shared_memory(gl.int64, [HEAD_BLOCKS * DEPTH, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(HEAD_BLOCKS * DEPTH):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(used.index(i), count=1)
    fence_async_shared()
    thread_barrier()
    weighing = (ready, used)
    gl.warp_specialize(
        [
            (
                _sums,
                (
                    output, blocks, slice_, tiles, weights, hand, (full, empty, ready, used), HEAD_BLOCKS, SPLIT,
                ),
            ),
            (_weigh, (FIRST, blocks, row_blocks, scores, tops, scale, brought, weights, hand, weighing, HEAD_BLOCKS)),
            (_weigh, (SECOND, blocks, row_blocks, scores, tops, scale, brought, weights, hand, weighing, HEAD_BLOCKS)),
            (_keys, (held, lists, ring, notes, tiles, (full, empty), slice_)),
        ],
        [4, 4, 8],
        [WEIGH_REGISTERS, WEIGH_REGISTERS, KEYS_REGISTERS],
    )  # fmt: skip
