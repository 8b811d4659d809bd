# ruff: noqa: N803, RUF005 - constexpr names are upper case, and Gluon compiles a subset of Python
"""Roles of ``add``: two make weights of a row's scores, one adds up weights times keys.

The programs that share 64 heads of a row, some columns each, need the same weights. So of a long row each makes those
of a few blocks, and all of them read all from memory. A count tells when they are there; the kernel of the scores has
set it to zero. Of a short row every program makes all weights, which takes less time than telling each other.
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

from dsv4_triton.hopper.few_rows.emit import emit
from dsv4_triton.hopper.few_rows.score import restored_scores
from dsv4_triton.hopper.layouts import SCORES, STORED_SCORES, WEIGHTS, here, thread_barrier
from dsv4_triton.hopper.softmax import weigh

HEADS = gl.constexpr(gl.SliceLayout(1, SCORES))
#: blocks of a row that is short
SHORT = gl.constexpr(4)
#: fp32 numbers of a block for each of 64 heads: the factor of what came before, the maximum with it, the weights' sum
NUMBERS = gl.constexpr(3)
#: blocks of weights that are on their way from memory at once
BATCH = gl.constexpr(5)
# Maxima of up to 32 blocks [blocks, heads]; without blocks it is HEADS.
MAXIMA = gl.constexpr(
    gl.DistributedLinearLayout(
        [[4, 0], [8, 0], [16, 0], [0, 8]],
        [[1, 0], [2, 0], [0, 1], [0, 2], [0, 4]], [[0, 16], [0, 32]], [], [32, 64],
    )
)  # fmt: skip


@gluon.jit
def weigh_up(TURN: gl.constexpr, maker, makers, blocks, scores, tops, scale, made, count, near):
    """A role of four warps: weights of blocks of a row.

    Of a short row every second block's for its own program, in shared memory. Of a long one those of the blocks
    ``maker, maker + makers, ...`` for all programs, in memory; only the first ``makers`` roles make any, so that no
    block is made, and counted, twice.

    near: bf16 ``[SHORT, 4096]``, the NUMBERS, fp32 ``[SHORT, 64]`` each, and barriers ``[SHORT, 1]``; made: bf16
    ``[blocks, 4096]`` and fp32 ``[blocks, NUMBERS, 64]``.
    """
    if blocks <= SHORT:
        weights, hand, ready = near
        for block in range(TURN, blocks, 2):
            x, numbers = _weights_of(scores, tops, scale, block)
            weights.index(block).store(x)
            for i in gl.static_range(NUMBERS):
                hand[i].index(block).store(numbers[i])
            thread_barrier()
            mbarrier.arrive(ready.index(block), count=1)
    elif maker < makers:
        made_weights, made_numbers = made
        for block in range(maker, blocks, makers):
            x, numbers = _weights_of(scores, tops, scale, block)
            gl.store(made_weights + (block * 4096 + gl.arange(0, 4096, WEIGHTS)), x)
            for i in gl.static_range(NUMBERS):
                gl.store(made_numbers + (block * (NUMBERS * 64) + i * 64 + gl.arange(0, 64, HEADS)), numbers[i])
            # All of this role's threads have stored, then one of them says so.
            thread_barrier()
            _count_one(count)


@gluon.jit
def _weights_of(scores, tops, scale, block):
    """A block's weights under the maximum so far, as wgmma takes a first operand, and its NUMBERS."""
    stored = gl.load(scores + (block * 4096 + gl.arange(0, 4096, STORED_SCORES)))
    block_top = gl.load(tops + (block * 64 + gl.arange(0, 64, HEADS)))
    p, keep, top = weigh(restored_scores(stored), scale, _maximum_before(tops, block), block_top)
    x = gl.reshape(p.to(gl.bfloat16), [4, 2, 8, 4, 2, 4, 2])  # heads: 16s, 8s, 1s; keys: 16s, 8s, 2s, 1s
    x = gl.reshape(gl.permute(x, (3, 0, 2, 5, 4, 1, 6)), [4096])
    return gl.convert_layout(x, WEIGHTS, assert_trivial=True), (keep, top, gl.sum(p, 1))


@gluon.jit
def _maximum_before(tops, block):
    """The largest of the maxima of the blocks in front of a block, -inf of the first."""
    others = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, MAXIMA)), 1)
    heads = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, MAXIMA)), 0)
    maxima = gl.load(tops + (others * 64 + heads), mask=others < block, other=float("-inf"))
    return gl.convert_layout(gl.max(maxima, 0), HEADS, assert_trivial=True)


@gluon.jit
def _count_one(count):
    """One more block is there, for whoever sees the count."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 p, t, 0; "
        "@p red.release.gpu.global.add.u32 [$1], 1; }",
        "=r,l", [count.to(gl.int64, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _await_count(count, blocks):
    """Weights of all blocks are there, when this returns; the barrier is for the compiler (``wait_for_previous``)."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; AGAIN: ld.acquire.gpu.global.u32 $0, [$1]; setp.lt.s32 p, $0, $2; @p bra AGAIN; }",
        "=&r,l,r", [count.to(gl.int64, bitcast=True), blocks], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    thread_barrier()


@gluon.jit
def _operand(x, OPERAND: gl.constexpr):
    """Weights as they lie in memory as wgmma's first operand."""
    x = gl.reshape(x, [4, 4, 8, 4, 2, 2, 2])  # keys: 16s; heads: 16s, 1s; keys: 2s, 8s; heads: 8s; keys: 1s
    x = gl.reshape(gl.permute(x, (1, 5, 2, 0, 4, 3, 6)), [64, 64])
    return gl.convert_layout(x, OPERAND, assert_trivial=True)


@gluon.jit
def _made_of(made, block, OPERAND: gl.constexpr, ROWS: gl.constexpr):
    """A block's weights, the factor of what came before, and the weights' sum."""
    weights, numbers = made
    x = gl.load(weights + (block * 4096 + gl.arange(0, 4096, WEIGHTS)))
    of_block = numbers + (block * (NUMBERS * 64) + gl.arange(0, 64, ROWS))
    return _operand(x, OPERAND), gl.load(of_block), gl.load(of_block + 128)


@gluon.jit
def _add_block(sums, weighed, tile):
    """Sums and total with a block."""
    acc, total = sums
    x, keep, weight = weighed
    acc = warpgroup_mma(x, tile, acc * gl.expand_dims(keep, 1), is_async=True)
    total = gl.fma(total, keep, weight)
    acc, x = warpgroup_mma_wait(0, deps=[acc, x])
    return acc, total


@gluon.jit
def add_up(output, half, slice_, blocks, tiles, made, count, near, filled, SPLIT: gl.constexpr):
    """The role of four warps that adds up weights of ``weigh_up`` times a tile of each block, and the output.

    tiles: bf16 ``[blocks, 64, columns]``, all there with the barrier ``filled``.
    """
    columns: gl.constexpr = tiles.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    total = gl.zeros([64], gl.float32, rows)
    sums = gl.zeros([64, columns], gl.float32, layout), total
    top = total
    mbarrier.wait(filled, 0)
    fence_async_shared()
    thread_barrier()
    if blocks <= SHORT:
        weights, hand, ready = near
        for block in range(blocks):
            mbarrier.wait(ready.index(block), 0)
            x = _operand(weights.index(block).load(WEIGHTS), operand)
            weighed = x, hand[0].index(block).load(rows), hand[2].index(block).load(rows)
            top = hand[1].index(block).load(rows)
            sums = _add_block(sums, weighed, tiles.index(block))
    else:
        _await_count(count, blocks)
        for first in range(0, blocks, BATCH):
            held = ()
            for j in gl.static_range(BATCH):
                # behind the last block it is that one once more, for nothing
                held = held + (_made_of(made, gl.minimum(first + j, blocks - 1), operand, rows),)
            here()
            for j in gl.static_range(BATCH):
                if first + j < blocks:
                    sums = _add_block(sums, held[j], tiles.index(first + j))
        top = gl.load(made[1] + ((blocks - 1) * (NUMBERS * 64) + 64 + gl.arange(0, 64, rows)))
    emit(sums[0], top, sums[1], output, half, slice_, layout, SPLIT)
