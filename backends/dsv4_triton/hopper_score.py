# ruff: noqa: N803, SIM113 - constexpr names are upper case, and Gluon compiles a subset of Python
"""Few rows, the first of two kernels: scores of blocks of keys, a row's blocks by any number of programs.

Two roles of four warps multiply, every second block or, with 128 heads, half of the heads; eight warps fetch and decode
keys for them, as ``hopper_keys`` does.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from dsv4_triton.hopper_items import offset_of, row_lengths
from dsv4_triton.hopper_keys import poisoned, put, put_decoded, words_of
from dsv4_triton.hopper_layouts import (
    BLOCK,
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
from dsv4_triton.hopper_notes import factors_of, locate, slots_of
from dsv4_triton.hopper_scores import multiply
from dsv4_triton.hopper_softmax import block_maximum

FIRST = gl.constexpr(0)
SECOND = gl.constexpr(1)
KEYS = gl.constexpr(gl.SliceLayout(1, WORDS_8))
PLACES = gl.constexpr(gl.SliceLayout(1, PIECES_8))


@gluon.jit
def _factors(codes, valid, GROUP: gl.constexpr):
    """The factors of a group of each key, 0 for keys that do not count."""
    return gl.where(valid, factors_of((codes >> (8 * GROUP)).to(gl.int32) & 255), 0)


@gluon.jit
def _words(places, GROUP: gl.constexpr):
    """The GROUP-th 64 bytes of each key."""
    return words_of(places, GROUP * 64, PIECES_8, WORDS_8)


@gluon.jit
def _block_at(row, block):
    """A cursor on a block of a row, as ``hopper_notes`` has them."""
    n, extra, blocks, index, extra_index = row
    return block * 0, block, block * 0, blocks, n, extra, index, extra_index


@gluon.jit
def _gather(row, lists, tiles, biases, bars, part, programs, STAGES: gl.constexpr):
    """Blocks of this program, one after the other, decoded into shared memory; the next one is on its way."""
    full, empty = bars
    cursor = _block_at(row, part)
    place, codes, valid = locate(lists, cursor, slots_of(cursor, KEYS), KEYS)
    cursor = _block_at(row, part + programs)
    slots = slots_of(cursor, KEYS)
    at = gl.convert_layout(place, PLACES, assert_trivial=True)
    x0, x1, x2 = _words(at, 0), _words(at, 4), _words(at, 8)
    x3, x4, x5 = _words(at, 2), _words(at, 6), _words(at, 1)
    x6, x7, x8 = _words(at, 5), _words(at, 3), _words(at, 7)
    done = 0
    for block in range(part, row[2], programs):
        stage = done % STAGES
        next_place, next_codes, next_valid = locate(lists, cursor, slots, KEYS)
        cursor = _block_at(row, block + 2 * programs)
        slots = slots_of(cursor, KEYS)
        at = gl.convert_layout(next_place, PLACES, assert_trivial=True)
        tile_a, tile_b = tiles[0].index(stage), tiles[1].index(stage)
        tile_c, tile_d = tiles[2].index(stage), tiles[3].index(stage)
        flags = gl.full([BLOCK, 16], 0, gl.int32, WORDS_8)
        counts = gl.expand_dims(valid, 1)
        mbarrier.wait(empty.index(stage), ((done // STAGES) & 1) ^ 1)
        flags = put_decoded(tile_a, 0, x0, _factors(codes, valid, 0), flags, True)
        x0 = _words(at, 0)
        flags = put_decoded(tile_c, 0, x1, _factors(codes, valid, 4), flags, True)
        x1 = _words(at, 4)
        put(tile_d, gl.where(counts, x2, 0), 96)
        x2 = _words(at, 8)
        flags = put_decoded(tile_b, 0, x3, _factors(codes, valid, 2), flags, True)
        x3 = _words(at, 2)
        flags = put_decoded(tile_d, 0, x4, _factors(codes, valid, 6), flags, True)
        x4 = _words(at, 6)
        flags = put_decoded(tile_a, 64, x5, _factors(codes, valid, 1), flags, True)
        x5 = _words(at, 1)
        flags = put_decoded(tile_c, 64, x6, _factors(codes, valid, 5), flags, True)
        x6 = _words(at, 5)
        flags = put_decoded(tile_b, 64, x7, _factors(codes, valid, 3), flags, True)
        x7 = _words(at, 3)
        put(tile_d, gl.where(counts, x8, 0), 64)
        x8 = _words(at, 7)
        biases.index(stage).store(gl.where(valid, gl.where(poisoned(flags, KEYS), float("nan"), 0.0), float("-inf")))
        codes, valid = next_codes, next_valid
        mbarrier.arrive(full.index(stage), count=1)
        done += 1


@gluon.jit
def stored_scores(s):
    """Scores [64 heads, 64 keys] in the order in which they lie in memory, in the same registers."""
    s = gl.reshape(s, [4, 2, 8, 8, 4, 2])  # heads: 16s, 8s, 1s; keys: 8s, 2s, 1s
    s = gl.reshape(gl.permute(s, (3, 0, 2, 4, 1, 5)), [4096])
    return gl.convert_layout(s, STORED_SCORES, assert_trivial=True)


@gluon.jit
def _score(
    TURN: gl.constexpr, query, q, q_h, blocks, scale, tiles, biases, bars, part, programs, scores, tops, row_blocks,
    HEAD_BLOCKS: gl.constexpr,
):  # fmt: skip
    """Every second block (64 heads), or 64 of the heads of every block (128 heads)."""
    full, empty, asked = bars
    half: gl.constexpr = TURN if HEAD_BLOCKS == 2 else 0
    stage: gl.constexpr = 0 if HEAD_BLOCKS == 2 else TURN
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
    done = 0
    for block in range(part + (TURN - half) * programs, blocks, step * programs):
        mbarrier.wait(full.index(stage), done & 1)
        fence_async_shared()
        thread_barrier()
        s = multiply(queries, tiles, stage)
        bias = gl.expand_dims(biases.index(stage).load(gl.SliceLayout(0, SCORES)), 0)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(empty.index(stage), count=1)
        s = gl.where(bias == 0.0, s, bias)
        gl.store(tops + block * 64 + heads, block_maximum(s, scale))
        gl.store(scores + block * 4096 + gl.arange(0, 4096, STORED_SCORES), stored_scores(s))
        done += 1


@gluon.jit(do_not_specialize=[
    "seq", "q_b", "q_s", "q_h", "i_b", "i_s", "e_b", "e_s", "width", "extra_width", "given", "shift", "extra_shift",
    "stride", "extra_stride", "capacity", "extra_capacity", "programs", "row_blocks",
], do_not_specialize_on_alignment=["index", "lengths", "extra_index", "extra_lengths"])  # fmt: skip
def score_blocks(
    q, q_b, q_s, q_h, scale, seq, programs, row_blocks,
    cache, shift, stride, capacity, index, i_b, i_s, lengths, width,
    extra_cache, extra_shift, extra_stride, extra_capacity, extra_index, e_b, e_s, extra_lengths, extra_width,
    given, scores, tops, HEAD_BLOCKS: gl.constexpr, SCORES_REGISTERS: gl.constexpr, GATHER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Scores of the blocks ``part, part + programs, ...`` of a row, -inf for keys that do not count, and their maxima.

    scores: fp32 ``[rows, HEAD_BLOCKS, row_blocks, 4096]``, not yet scaled; tops: fp32 ``[rows, HEAD_BLOCKS, row_blocks,
    64]``, scaled (``hopper_softmax.block_maximum``).
    Other arguments are those of ``hopper_kernel.attend``.
    """
    stages: gl.constexpr = 3 - HEAD_BLOCKS
    launch_dependents()
    row = gl.program_id(0) // programs
    part = gl.program_id(0) % programs
    b, s = row // seq, row % seq
    n, extra = row_lengths((lengths, extra_lengths, width, extra_width, given), b)
    blocks = (n + BLOCK - 1) // BLOCK + (extra + BLOCK - 1) // BLOCK
    held = (n, extra, blocks, index + offset_of(b, i_b, s, i_s), extra_index + offset_of(b, e_b, s, e_s))
    words = cache.to(gl.pointer_type(gl.int32), bitcast=True)
    extra_words = extra_cache.to(gl.pointer_type(gl.int32), bitcast=True)
    lists = (words, extra_words, shift, extra_shift, stride, extra_stride, capacity, extra_capacity)
    q += offset_of(b, q_b, s, q_s) * 8
    scores += row.to(gl.int64) * row_blocks * (HEAD_BLOCKS * 4096)
    tops += row.to(gl.int64) * row_blocks * (HEAD_BLOCKS * 64)
    if HEAD_BLOCKS == 2:
        query = (
            gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], SWIZZLED),
            gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], SWIZZLED),
        )
    else:
        query = (gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], SWIZZLED),)
    tiles = (
        gl.allocate_shared_memory(gl.bfloat16, [stages, BLOCK, 128], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [stages, BLOCK, 128], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [stages, BLOCK, 128], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [stages, BLOCK, 128], SWIZZLED),
    )
    biases = gl.allocate_shared_memory(gl.float32, [stages, BLOCK], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    asked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=HEAD_BLOCKS)
    mbarrier.init(asked, count=HEAD_BLOCKS)
    fence_async_shared()
    thread_barrier()
    bars = (full, empty, asked)
    gl.warp_specialize(
        [
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
            (_gather, (held, lists, tiles, biases, (full, empty), part, programs, stages)),
        ],
        [4, 8],
        [SCORES_REGISTERS, GATHER_REGISTERS],
    )  # fmt: skip
