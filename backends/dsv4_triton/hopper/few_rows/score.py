# ruff: noqa: N803, RUF059, SIM113 - constexpr names are upper case, and Gluon compiles a subset of Python
"""Few rows, the first of two kernels: scores of blocks of keys, a row's blocks by any number of programs.

Two roles of four warps multiply, every second block or, with 128 heads, half of the heads; one fetches keys for them
(``fetch``), two decode, half of the channels each.
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

from dsv4_triton.hopper.few_rows.fetch import FETCHING, GROUPS, fetch_blocks, slot_factors
from dsv4_triton.hopper.items import offset_of, row_of, unknown
from dsv4_triton.hopper.keys import poisoned, put, put_decoded
from dsv4_triton.hopper.layouts import (
    BLOCK,
    KEYS,
    MOST_BLOCKS,
    PLAIN,
    PLAIN_2D,
    ROWS,
    SCORES,
    STORED_SCORES,
    SWIZZLED,
    WORDS,
    launch_dependents,
    thread_barrier,
)
from dsv4_triton.hopper.notes import lists_of
from dsv4_triton.hopper.softmax import block_maximum

FIRST = gl.constexpr(0)
SECOND = gl.constexpr(1)


@gluon.jit
def _decode(SIDE: gl.constexpr, blocks, ring, notes, tiles, biases, bars, first, step):
    """A role of four warps: raw keys to bf16 in the first or the second two tiles of a block, when the last is used."""
    landed, taken, noted, full, empty = bars
    codes, fills = notes
    slots: gl.constexpr = ring.shape[0] // 2
    left, right = tiles[2 * SIDE].index(0), tiles[2 * SIDE + 1].index(0)
    done = 0
    for _ in range(first, blocks, step):
        turn = done & 1
        entry = done % codes.shape[0]
        # The scale bytes are there with any slot of the block. Its own, as the other role's may be filled again by now.
        used = 5 * done + 2 * SIDE
        mbarrier.wait(noted.index(entry), (done // codes.shape[0]) & 1)
        mbarrier.wait(landed.index(used % slots), (used // slots) & 1)
        code = codes.index(entry).load(KEYS)
        fill = fills.index(entry).load(KEYS).to(gl.float32)
        valid = fill == 0.0
        flags = gl.full([BLOCK, 16], 0, gl.int32, WORDS)
        mbarrier.wait(empty.index(SIDE), (done & 1) ^ 1)
        for j in gl.static_range(2):
            used = 5 * done + 2 * SIDE + j
            slot = used % slots
            if j > 0:
                mbarrier.wait(landed.index(slot), (used // slots) & 1)
            x = ring.index(2 * slot).load(WORDS)
            y = ring.index(2 * slot + 1).load(WORDS)
            flags = put_decoded(left, 64 * j, x, slot_factors(code, valid, GROUPS[2 * SIDE + j][0]), flags, True)
            if GROUPS[2 * SIDE + j][1] < 7:
                flags = put_decoded(right, 64 * j, y, slot_factors(code, valid, GROUPS[2 * SIDE + j][1]), flags, True)
            else:
                put(right, gl.where(gl.expand_dims(valid, 1), y, 0), 64)
            thread_barrier()
            mbarrier.arrive(taken.index(slot), count=1)
        if SIDE == 1:
            used = 5 * done + 4
            slot = used % slots
            mbarrier.wait(landed.index(slot), (used // slots) & 1)
            x = ring.index(2 * slot).load(WORDS)
            put(right, gl.where(gl.expand_dims(valid, 1), x, 0), 96)
            thread_barrier()
            mbarrier.arrive(taken.index(slot), count=1)
        biases.index(2 * turn + SIDE).store(gl.where(valid & poisoned(flags, KEYS), float("nan"), fill))
        thread_barrier()
        mbarrier.arrive(full.index(2 * turn + SIDE), count=1)
        done += 1


@gluon.jit
def stored_scores(s):
    """Scores [64 heads, 64 keys] in the order in which they lie in memory, in the same registers."""
    s = gl.reshape(s, [4, 2, 8, 8, 4, 2])  # heads: 16s, 8s, 1s; keys: 8s, 2s, 1s
    s = gl.reshape(gl.permute(s, (3, 0, 2, 4, 1, 5)), [4096])
    return gl.convert_layout(s, STORED_SCORES, assert_trivial=True)


@gluon.jit
def restored_scores(stored):
    """The inverse of ``stored_scores``."""
    s = gl.permute(gl.reshape(stored, [8, 4, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5))
    return gl.convert_layout(gl.reshape(s, [64, BLOCK]), SCORES, assert_trivial=True)


@gluon.jit
def _score(
    TURN: gl.constexpr, query, q, q_h, blocks, scale, tiles, biases, bars, part, programs, scores, tops, row_blocks,
    HEAD_BLOCKS: gl.constexpr,
):  # fmt: skip
    """Every second block (64 heads), or 64 of the heads of every block (128 heads)."""
    full, empty, asked = bars
    half: gl.constexpr = TURN if HEAD_BLOCKS == 2 else 0
    step: gl.constexpr = 3 - HEAD_BLOCKS
    queries = query[half]
    if HEAD_BLOCKS == 2 or TURN == 0:
        h = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, ROWS)) + half * 64, 1)
        column = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, ROWS)), 0)
        for i in gl.static_range(4):
            async_copy.async_copy_global_to_shared(queries.index(i), q + (h * (q_h * 8) + (column + i * 128)))
        async_copy.commit_group()
        async_copy.wait_group(0)
        mbarrier.arrive(asked, count=1)
    mbarrier.wait(asked, 0)
    scores += half * row_blocks.to(gl.int64) * 4096
    tops += half * row_blocks.to(gl.int64) * 64
    heads = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    done = TURN - half
    for block in range(part + (TURN - half) * programs, blocks, step * programs):
        turn = done & 1
        # else the descriptors of all products are made once and kept, in local memory
        nothing = unknown(turn * 0)
        s = gl.zeros([64, 64], gl.float32, SCORES)
        bias = gl.zeros([64], gl.float32, gl.SliceLayout(0, SCORES))
        for side in gl.static_range(2):
            mbarrier.wait(full.index(2 * turn + side), (done >> 1) & 1)
            fence_async_shared()
            thread_barrier()
            for i in gl.static_range(2 * side, 2 * side + 2):
                s = warpgroup_mma(
                    queries.index(i + nothing), tiles[i].index(nothing).permute((1, 0)), s, use_acc=i > 0, is_async=True
                )
            # 0, -inf in both, or NaN
            bias += biases.index(2 * turn + side).load(gl.SliceLayout(0, SCORES))
            s = warpgroup_mma_wait(0, deps=[s])
            thread_barrier()
            mbarrier.arrive(empty.index(side), count=1)
        bias = gl.expand_dims(bias, 0)
        s = gl.where(bias == 0.0, s, bias)
        gl.store(tops + block * 64 + heads, block_maximum(s, scale))
        gl.store(scores + block * 4096 + gl.arange(0, 4096, STORED_SCORES), stored_scores(s))
        done += step


@gluon.jit(do_not_specialize=[
    "seq", "q_b", "q_s", "q_h", "i_b", "i_s", "e_b", "e_s", "width", "extra_width", "given", "shift", "extra_shift",
    "stride", "extra_stride", "capacity", "extra_capacity", "programs", "row_blocks", "splits",
], do_not_specialize_on_alignment=["index", "lengths", "extra_index", "extra_lengths"])  # fmt: skip
def score_blocks(
    q, q_b, q_s, q_h, scale, seq, programs, row_blocks, splits,
    cache, shift, stride, capacity, index, i_b, i_s, lengths, width,
    extra_cache, extra_shift, extra_stride, extra_capacity, extra_index, e_b, e_s, extra_lengths, extra_width,
    given, scores, tops, counts, SPLIT: gl.constexpr, HEAD_BLOCKS: gl.constexpr, SLOTS: gl.constexpr,
    SCORES_REGISTERS: gl.constexpr, DECODE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Scores of the blocks ``part, part + programs, ...`` of an item, -inf for keys that do not count; their maxima.

    An item is a row, or one of ``splits`` of it, of MOST_BLOCKS blocks at most. scores: fp32 ``[items, HEAD_BLOCKS,
    row_blocks, 4096]``, not yet scaled; tops: fp32 ``[items, HEAD_BLOCKS, row_blocks, 64]``, scaled
    (``softmax.block_maximum``); counts: int32 ``[items, HEAD_BLOCKS]``, set to zero for the second kernel.
    Other arguments are those of ``kernel.attend``.
    """
    launch_dependents()
    item = gl.program_id(0) // programs
    part = gl.program_id(0) % programs
    b, s, split, row_splits, held = row_of(
        item, seq, splits, (lengths, extra_lengths, width, extra_width, given),
        (index, extra_index, i_b, i_s, e_b, e_s), SPLIT, MOST_BLOCKS,
    )  # fmt: skip
    blocks = held[2]
    if part == 0:
        for half in gl.static_range(HEAD_BLOCKS):
            gl.store(counts + (item * HEAD_BLOCKS + half), 0)
    lists = lists_of(cache, shift, stride, capacity, extra_cache, extra_shift, extra_stride, extra_capacity)
    q += offset_of(b, q_b, s, q_s) * 8
    scores += item.to(gl.int64) * row_blocks * (HEAD_BLOCKS * 4096)
    tops += item.to(gl.int64) * row_blocks * (HEAD_BLOCKS * 64)
    if HEAD_BLOCKS == 2:
        query = (
            gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], SWIZZLED),
            gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], SWIZZLED),
        )
    else:
        query = (gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], SWIZZLED),)
    tiles = (
        gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK, 128], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK, 128], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK, 128], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK, 128], SWIZZLED),
    )
    ring = gl.allocate_shared_memory(gl.int32, [2 * SLOTS, BLOCK, 16], PLAIN_2D)
    noted_at_once: gl.constexpr = SLOTS // 2
    notes = (
        gl.allocate_shared_memory(gl.int64, [noted_at_once, BLOCK], PLAIN),
        gl.allocate_shared_memory(gl.bfloat16, [noted_at_once, BLOCK], PLAIN),
    )
    biases = gl.allocate_shared_memory(gl.float32, [4, BLOCK], PLAIN)
    landed = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    noted = gl.allocate_shared_memory(gl.int64, [noted_at_once, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    asked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(landed.index(i), count=FETCHING)
        mbarrier.init(taken.index(i), count=1)
    for i in gl.static_range(noted_at_once):
        mbarrier.init(noted.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(empty.index(i), count=HEAD_BLOCKS)
    mbarrier.init(asked, count=HEAD_BLOCKS)
    fence_async_shared()
    thread_barrier()
    bars = (full, empty, asked)
    decoding = (landed, taken, noted, full, empty)
    gl.warp_specialize(
        [
            (fetch_blocks, (held, lists, ring, notes, (landed, taken, noted), part, programs)),
            (
                _score,
                (
                    FIRST, query, q, q_h, blocks, scale, tiles, biases, bars, part, programs, scores, tops,
                    row_blocks, HEAD_BLOCKS,
                ),
            ),
            (
                _score,
                (
                    SECOND, query, q, q_h, blocks, scale, tiles, biases, bars, part, programs, scores, tops,
                    row_blocks, HEAD_BLOCKS,
                ),
            ),
            (_decode, (FIRST, blocks, ring, notes, tiles, biases, decoding, part, programs)),
            (_decode, (SECOND, blocks, ring, notes, tiles, biases, decoding, part, programs)),
        ],
        [4, 4, 4, 4],
        [SCORES_REGISTERS, SCORES_REGISTERS, DECODE_REGISTERS, DECODE_REGISTERS],
    )  # fmt: skip
