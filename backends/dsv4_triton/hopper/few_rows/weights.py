# ruff: noqa: N803, RUF005, RUF059 - constexpr names are upper case, and Gluon compiles a subset of Python
"""Roles of ``add``: two make weights of a row's scores, each of every second block, one adds up weights times keys."""

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
#: blocks of scores that are on their way at once
AHEAD = gl.constexpr(3)


@gluon.jit
def weigh_up(TURN: gl.constexpr, blocks, scores, tops, scale, weights, hand, bars):
    """A role of four warps: weights of every second block of a row for ``add_up``.

    weights: bf16 ``[entries, 4096]``, in place of notes on keys until those are all there; hand: fp32 ``[entries, 64]``
    each, of a block the factor of what came before, the maximum with it, the sum of its weights.
    """
    top = gl.full([64], float("-inf"), gl.float32, HEADS)
    mbarrier.wait(bars[0], 0)
    for i in range(TURN, blocks, 2 * AHEAD):
        held = ()
        for j in gl.static_range(AHEAD):
            held = held + (_scores_of(scores, tops, i + 2 * j, blocks),)
        here()
        for j in gl.static_range(AHEAD):
            top = _hand_over(held[j], top, i + 2 * j, blocks, scale, weights, hand, bars)


@gluon.jit
def _scores_of(scores, tops, block, blocks):
    """Scores of a block as they lie in memory, its maxima, those of the block before; behind the last, of the last."""
    held = gl.maximum(gl.minimum(block, blocks - 1), 0)
    heads = gl.arange(0, 64, HEADS)
    return (
        gl.load(scores + (held * 4096 + gl.arange(0, 4096, STORED_SCORES))),
        gl.load(tops + (held * 64 + heads)),
        gl.load(tops + (gl.maximum(held - 1, 0) * 64 + heads)),
    )


@gluon.jit
def _hand_over(held, top, block, blocks, scale, weights, hand, bars):
    """A block's weights under the maximum so far, the factor of what came before, and their sum; the new maximum."""
    filled, ready, used = bars
    keeps, maxima, sums = hand
    entries: gl.constexpr = weights.shape[0]
    stored, block_top, before = held
    if block < blocks:
        if block > 0:
            top = gl.maximum(top, before)
        p, keep, top = weigh(restored_scores(stored), scale, top, block_top)
        entry = block % entries
        mbarrier.wait(used.index(entry), ((block // entries) & 1) ^ 1)
        x = gl.reshape(p.to(gl.bfloat16), [4, 2, 8, 4, 2, 4, 2])  # heads: 16s, 8s, 1s; keys: 16s, 8s, 2s, 1s
        x = gl.reshape(gl.permute(x, (3, 0, 2, 5, 4, 1, 6)), [4096])
        weights.index(entry).store(gl.convert_layout(x, WEIGHTS, assert_trivial=True))
        keeps.index(entry).store(keep)
        maxima.index(entry).store(top)
        sums.index(entry).store(gl.sum(p, 1))
        thread_barrier()
        mbarrier.arrive(ready.index(entry), count=1)
    return top


@gluon.jit
def _operand(x, OPERAND: gl.constexpr):
    """Weights as they lie in shared memory as wgmma's first operand."""
    x = gl.reshape(x, [4, 4, 8, 4, 2, 2, 2])  # keys: 16s; heads: 16s, 1s; keys: 2s, 8s; heads: 8s; keys: 1s
    x = gl.reshape(gl.permute(x, (1, 5, 2, 0, 4, 3, 6)), [64, 64])
    return gl.convert_layout(x, OPERAND, assert_trivial=True)


@gluon.jit
def add_up(output, half, slice_, blocks, tiles, weights, hand, bars, SPLIT: gl.constexpr):
    """The role of four warps that adds up weights of ``weigh_up`` times a tile of each block, and the output.

    tiles: bf16 ``[blocks, 64, columns]``, all there with the first of ``bars``.
    """
    filled, ready, used = bars
    keeps, maxima, sums = hand
    entries: gl.constexpr = weights.shape[0]
    columns: gl.constexpr = tiles.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    acc = gl.zeros([64, columns], gl.float32, layout)
    total = gl.zeros([64], gl.float32, rows)
    top = total
    mbarrier.wait(filled, 0)
    fence_async_shared()
    thread_barrier()
    if blocks > 0:
        mbarrier.wait(ready.index(0), 0)
        p = _operand(weights.index(0).load(WEIGHTS), operand)
        keep = keeps.index(0).load(rows)
        for block in range(blocks):
            entry = block % entries
            acc = acc * gl.expand_dims(keep, 1)
            token = warpgroup_mma(p, tiles.index(block), acc, is_async=True)
            total = gl.fma(total, keep, sums.index(entry).load(rows))
            top = maxima.index(entry).load(rows)
            # All warps have loaded what lies in this entry.
            thread_barrier()
            mbarrier.arrive(used.index(entry), count=1)
            # behind the last block it is that one once more, for nothing
            after = gl.minimum(block + 1, blocks - 1)
            mbarrier.wait(ready.index(after % entries), (after // entries) & 1)
            next_p = _operand(weights.index(after % entries).load(WEIGHTS), operand)
            keep = keeps.index(after % entries).load(rows)
            acc, p = warpgroup_mma_wait(0, deps=[token, p])
            p = next_p
    emit(acc, top, total, output, half, slice_, layout, SPLIT)
