# ruff: noqa: N803, RUF005 - constexpr names are upper case, and Gluon compiles a subset of Python
"""Dozens of rows, the second of two kernels: softmax over a row's blocks, weights times keys, 128 columns a program.

As ``add`` does it for a few rows, but for all heads of a row at once, and with keys that pass through a ring of blocks:
eight warps fetch and decode them, a role of four for every 64 heads makes weights, and adds up.
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

from dsv4_triton.hopper.few_rows.emit import emit
from dsv4_triton.hopper.few_rows.fetch import copy_group, slot_factors
from dsv4_triton.hopper.few_rows.score import restored_scores
from dsv4_triton.hopper.items import offset_of, row_of
from dsv4_triton.hopper.keys import put, put_decoded
from dsv4_triton.hopper.layouts import (
    BLOCK,
    MOST_BLOCKS,
    PLAIN,
    PLAIN_2D,
    SCORES,
    STORED_SCORES,
    SUMS,
    SWIZZLED,
    WORDS_8,
    here,
    thread_barrier,
    wait_for_previous,
)
from dsv4_triton.hopper.notes import address_of, entries_of, lists_of
from dsv4_triton.hopper.softmax import weigh

FIRST = gl.constexpr(0)
SECOND = gl.constexpr(1)
HEADS = gl.constexpr(gl.SliceLayout(1, SCORES))
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
    here()
    located = ()
    for j in gl.static_range(steps):
        entry, main, inside = found[j]
        located = located + (address_of(lists, entry, main, inside),)
    here()
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
def _bring(scores, tops, block, blocks, brought):
    """Scores and maxima of a block on their way into its place in the ring."""
    ring, ring_tops = brought
    slots: gl.constexpr = ring.shape[0]
    if block < blocks:
        place = block % slots
        at = scores + (block * 4096 + gl.arange(0, 4096, STORED_SCORES))
        async_copy.async_copy_global_to_shared(ring.index(place), at)
        async_copy.async_copy_global_to_shared(ring_tops.index(place), tops + (block * 64 + gl.arange(0, 64, HEADS)))
    async_copy.commit_group()


@gluon.jit
def _weights(block, brought, scale, top):
    """A block's weights under the maximum so far, the factor of what came before, the new maximum."""
    ring, ring_tops = brought
    place = block % ring.shape[0]
    stored = ring.index(place).load(STORED_SCORES)
    return weigh(restored_scores(stored), scale, top, ring_tops.index(place).load(HEADS))


@gluon.jit
def _weigh_and_add(
    output, half, slice_, blocks, tiles, bars, scores, tops, scale, brought, SPLIT: gl.constexpr,
):  # fmt: skip
    """A role of four warps, for 64 heads: softmax, weights times keys, the output.

    The weights of the next block are made while the product of this one is. They go from registers into the product as
    they are: wgmma takes its first operand in the layout that scores have. brought: fp32 ``[slots, 4096]`` and
    ``[slots, 64]``, a ring for scores and their maxima on their way.
    """
    full, empty = bars
    slots: gl.constexpr = brought[0].shape[0]
    stages: gl.constexpr = tiles.shape[0]
    operand: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    rows: gl.constexpr = gl.SliceLayout(1, SUMS)
    acc = gl.zeros([64, 128], gl.float32, SUMS)
    total = gl.zeros([64], gl.float32, HEADS)
    top = gl.full([64], float("-inf"), gl.float32, HEADS)
    wait_for_previous()
    for i in gl.static_range(slots - 1):
        _bring(scores, tops, blocks * 0 + i, blocks, brought)
    if blocks > 0:
        async_copy.wait_group(slots - 2)
        p, keep, top = _weights(blocks * 0, brought, scale, top)
        for block in range(blocks):
            stage = block % stages
            mbarrier.wait(full.index(stage), (block // stages) & 1)
            fence_async_shared()
            thread_barrier()
            acc = acc * gl.expand_dims(gl.convert_layout(keep, rows, assert_trivial=True), 1)
            x = gl.convert_layout(p.to(gl.bfloat16), operand, assert_trivial=True)
            token = warpgroup_mma(x, tiles.index(stage), acc, is_async=True)
            total = gl.fma(total, keep, gl.sum(p, 1))
            _bring(scores, tops, block + slots - 1, blocks, brought)
            async_copy.wait_group(slots - 2)
            # behind the last block it is that one once more, for nothing
            next_p, keep, top = _weights(gl.minimum(block + 1, blocks - 1), brought, scale, top)
            acc, x = warpgroup_mma_wait(0, deps=[token, x])
            p = next_p
            thread_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
    async_copy.wait_group(0)
    top, total = gl.convert_layout(top, rows, assert_trivial=True), gl.convert_layout(total, rows, assert_trivial=True)
    emit(acc, top, total, output, half, slice_, SUMS, SPLIT)


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
    STAGES: gl.constexpr, RING: gl.constexpr, ADD_REGISTERS: gl.constexpr, KEYS_REGISTERS: gl.constexpr,
):  # fmt: skip
    """128 columns of the output of a row; the first program of a row also has its lse.

    Arguments as ``score.score_blocks`` has them, and ``kernel.attend``.
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
    ring = gl.allocate_shared_memory(gl.int32, [3 * SLOTS, BLOCK, 16], PLAIN_2D)
    notes = (
        gl.allocate_shared_memory(gl.int64, [MOST_BLOCKS // 4, 256], PLAIN),
        gl.allocate_shared_memory(gl.int32, [MOST_BLOCKS // 4, 256], PLAIN),
        gl.allocate_shared_memory(gl.int32, [MOST_BLOCKS // 4, 256], PLAIN),
    )
    brought = (
        gl.allocate_shared_memory(gl.float32, [RING, 4096], PLAIN),
        gl.allocate_shared_memory(gl.float32, [RING, 64], PLAIN),
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=HEAD_BLOCKS)
    fence_async_shared()
    thread_barrier()
    bars = (full, empty)
    if HEAD_BLOCKS == 1:
        gl.warp_specialize(
            [
                (_weigh_and_add, (output, FIRST, slice_, blocks, tiles, bars, scores, tops, scale, brought, SPLIT)),
                (_keys, (held, lists, ring, notes, tiles, bars, slice_)),
            ],
            [8],
            [KEYS_REGISTERS],
        )
    else:
        others = (
            gl.allocate_shared_memory(gl.float32, [RING, 4096], PLAIN),
            gl.allocate_shared_memory(gl.float32, [RING, 64], PLAIN),
        )
        other_scores, other_tops = scores + row_blocks.to(gl.int64) * 4096, tops + row_blocks.to(gl.int64) * 64
        gl.warp_specialize(
            [
                (_weigh_and_add, (output, FIRST, slice_, blocks, tiles, bars, scores, tops, scale, brought, SPLIT)),
                (
                    _weigh_and_add,
                    (
                        output, SECOND, slice_, blocks, tiles, bars, other_scores, other_tops, scale, others,
                        SPLIT,
                    ),
                ),
                (_keys, (held, lists, ring, notes, tiles, bars, slice_)),
            ],
            [4, 8],
            [ADD_REGISTERS, KEYS_REGISTERS],
        )  # fmt: skip
