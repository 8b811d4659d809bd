# ruff: noqa: N803, RUF059 - constexpr names are upper case, and Gluon compiles a subset of Python
"""Few rows, the first of two kernels where every block of keys has a program: as ``score``, for least time.

There is nothing to overlap but the two halves of the block: eight warps have all of its bytes on their way at once, in
registers, and the products of the first 256 channels are made while they decode the others.
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

from dsv4_triton.hopper.few_rows.fetch import slot_factors
from dsv4_triton.hopper.few_rows.score import stored_scores
from dsv4_triton.hopper.items import offset_of, row_of
from dsv4_triton.hopper.keys import poisoned, put, put_decoded, words_of
from dsv4_triton.hopper.layouts import (
    BLOCK,
    MOST_BLOCKS,
    PIECES_8,
    PLAIN,
    ROWS,
    SCORES,
    STORED_SCORES,
    SWIZZLED,
    WORDS_8,
    launch_dependents,
    thread_barrier,
)
from dsv4_triton.hopper.notes import address_of, entries_of, lists_of
from dsv4_triton.hopper.softmax import block_maximum

FIRST = gl.constexpr(0)
SECOND = gl.constexpr(1)
KEYS = gl.constexpr(gl.SliceLayout(1, WORDS_8))
PLACES = gl.constexpr(gl.SliceLayout(1, PIECES_8))


@gluon.jit
def _words(place, GROUP: gl.constexpr):
    """The GROUP-th 64 bytes of each key."""
    return words_of(place, GROUP * 64, PIECES_8, WORDS_8)


@gluon.jit
def _gather(row, lists, tiles, bias, full, block):
    """The role of eight warps: the block into its four tiles of 128 channels, the first two of them first."""
    if block < row[2]:
        entry, main, inside = entries_of(row, block, KEYS, BLOCK)
        place, codes, valid = address_of(lists, entry, main, inside)
        at = gl.convert_layout(place, PLACES, assert_trivial=True)
        # Groups 0, 4 and 8 first: with each, L2 takes the 256 bytes it is in.
        x0, x4, x8 = _words(at, 0), _words(at, 4), _words(at, 8)
        x2, x1, x3 = _words(at, 2), _words(at, 1), _words(at, 3)
        x6, x5, x7 = _words(at, 6), _words(at, 5), _words(at, 7)
        counts = gl.expand_dims(valid, 1)
        flags = gl.full([BLOCK, 16], 0, gl.int32, WORDS_8)
        flags = put_decoded(tiles[0], 0, x0, slot_factors(codes, valid, 0), flags, True)
        flags = put_decoded(tiles[1], 0, x2, slot_factors(codes, valid, 2), flags, True)
        flags = put_decoded(tiles[0], 64, x1, slot_factors(codes, valid, 1), flags, True)
        flags = put_decoded(tiles[1], 64, x3, slot_factors(codes, valid, 3), flags, True)
        thread_barrier()
        mbarrier.arrive(full.index(0), count=1)
        flags = put_decoded(tiles[2], 0, x4, slot_factors(codes, valid, 4), flags, True)
        flags = put_decoded(tiles[3], 0, x6, slot_factors(codes, valid, 6), flags, True)
        flags = put_decoded(tiles[2], 64, x5, slot_factors(codes, valid, 5), flags, True)
        put(tiles[3], gl.where(counts, x7, 0), 64)
        bias.store(gl.where(valid, gl.where(poisoned(flags, KEYS), float("nan"), 0.0), float("-inf")))
        put(tiles[3], gl.where(counts, x8, 0), 96)
        thread_barrier()
        mbarrier.arrive(full.index(1), count=1)


@gluon.jit
def _score(HALF: gl.constexpr, query, q, q_h, blocks, scale, tiles, biases, full, block, scores, tops, row_blocks):
    """A role of four warps: 64 heads' scores of the block, and their maxima."""
    if block < blocks:
        h = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, ROWS)) + HALF * 64, 1)
        column = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, ROWS)), 0)
        for i in gl.static_range(4):
            async_copy.async_copy_global_to_shared(query.index(i), q + (h * (q_h * 8) + (column + i * 128)))
        async_copy.commit_group()
        async_copy.wait_group(0)
        s = gl.zeros([64, 64], gl.float32, SCORES)
        for side in gl.static_range(2):
            mbarrier.wait(full.index(side), 0)
            fence_async_shared()
            thread_barrier()
            for i in gl.static_range(2 * side, 2 * side + 2):
                s = warpgroup_mma(query.index(i), tiles[i].permute((1, 0)), s, use_acc=i > 0, is_async=True)
        bias = gl.expand_dims(biases.load(gl.SliceLayout(0, SCORES)), 0)
        s = warpgroup_mma_wait(0, deps=[s])
        s = gl.where(bias == 0.0, s, bias)
        at = HALF * row_blocks.to(gl.int64) + block
        gl.store(tops + (at * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES))), block_maximum(s, scale))
        gl.store(scores + (at * 4096 + gl.arange(0, 4096, STORED_SCORES)), stored_scores(s))


@gluon.jit(do_not_specialize=[
    "seq", "q_b", "q_s", "q_h", "i_b", "i_s", "e_b", "e_s", "width", "extra_width", "given", "shift", "extra_shift",
    "stride", "extra_stride", "capacity", "extra_capacity", "row_blocks", "splits",
], do_not_specialize_on_alignment=["index", "lengths", "extra_index", "extra_lengths"])  # fmt: skip
def score_once(
    q, q_b, q_s, q_h, scale, seq, row_blocks, splits,
    cache, shift, stride, capacity, index, i_b, i_s, lengths, width,
    extra_cache, extra_shift, extra_stride, extra_capacity, extra_index, e_b, e_s, extra_lengths, extra_width,
    given, scores, tops, counts, SPLIT: gl.constexpr, HEAD_BLOCKS: gl.constexpr,
    GATHER_REGISTERS: gl.constexpr, SCORES_REGISTERS: gl.constexpr,
):  # fmt: skip
    """As ``score.score_blocks`` with ``row_blocks`` programs a row."""
    launch_dependents()
    item = gl.program_id(0) // row_blocks
    block = gl.program_id(0) % row_blocks
    b, s, split, row_splits, held = row_of(
        item, seq, splits, (lengths, extra_lengths, width, extra_width, given),
        (index, extra_index, i_b, i_s, e_b, e_s), SPLIT, MOST_BLOCKS,
    )  # fmt: skip
    blocks = held[2]
    if block == 0:
        for half in gl.static_range(HEAD_BLOCKS):
            gl.store(counts + (item * HEAD_BLOCKS + half), 0)
    lists = lists_of(cache, shift, stride, capacity, extra_cache, extra_shift, extra_stride, extra_capacity)
    q += offset_of(b, q_b, s, q_s) * 8
    scores += item.to(gl.int64) * row_blocks * (HEAD_BLOCKS * 4096)
    tops += item.to(gl.int64) * row_blocks * (HEAD_BLOCKS * 64)
    tiles = (
        gl.allocate_shared_memory(gl.bfloat16, [BLOCK, 128], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [BLOCK, 128], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [BLOCK, 128], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [BLOCK, 128], SWIZZLED),
    )
    bias = gl.allocate_shared_memory(gl.float32, [BLOCK], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
    query = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], SWIZZLED)
    fence_async_shared()
    thread_barrier()
    if HEAD_BLOCKS == 1:
        gl.warp_specialize(
            [
                (_score, (FIRST, query, q, q_h, blocks, scale, tiles, bias, full, block, scores, tops, row_blocks)),
                (_gather, (held, lists, tiles, bias, full, block)),
            ],
            [8],
            [GATHER_REGISTERS],
        )
    else:
        other = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], SWIZZLED)
        gl.warp_specialize(
            [
                (_score, (FIRST, query, q, q_h, blocks, scale, tiles, bias, full, block, scores, tops, row_blocks)),
                (_score, (SECOND, other, q, q_h, blocks, scale, tiles, bias, full, block, scores, tops, row_blocks)),
                (_gather, (held, lists, tiles, bias, full, block)),
            ],
            [4, 8],
            [SCORES_REGISTERS, GATHER_REGISTERS],
        )
