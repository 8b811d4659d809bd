# ruff: noqa: N803, RUF059 - constexpr names are upper case, and Gluon compiles a subset of Python
"""The Hopper kernel's role ``scores``: queries times keys, and the online softmax, block by block."""

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

from dsv4_triton.hopper.items import item_lengths, item_place, item_span, offset_of, unknown
from dsv4_triton.hopper.layouts import ROWS, SCORES, thread_barrier
from dsv4_triton.hopper.softmax import block_maximum, weigh


@gluon.jit
def _query_rows(q, strides, place):
    """Pointer to the first of an item's 64 heads, and the stride of heads in elements."""
    local, b, s, head_block, split = place
    q_b, q_s, q_h = strides
    return q + (offset_of(b, q_b, s, q_s) + head_block.to(gl.int64) * 64 * q_h) * 8, q_h * 8


@gluon.jit
def _copy_query(q, strides, place, query):
    """An item's queries on their way into shared memory."""
    rows, stride = _query_rows(q, strides, place)
    for part in range(4):
        h = gl.expand_dims(unknown(gl.arange(0, 64, gl.SliceLayout(1, ROWS))), 1)
        column = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, ROWS)), 0)
        async_copy.async_copy_global_to_shared(query.index(part), rows + (h * stride + (column + part * 128)))
    async_copy.commit_group()


@gluon.jit
def multiply(query, tiles, stage):
    """Scores of a block, on their way."""
    s = gl.zeros([64, 64], gl.float32, SCORES)
    for part in gl.static_range(4):
        s = warpgroup_mma(
            query.index(part), tiles[part].index(stage).permute((1, 0)), s, use_acc=part > 0, is_async=True
        )
    return s


@gluon.jit
def scores(
    q, q_strides, rows, scale, query, tiles, biases, hand, bars, items,
    SPLIT: gl.constexpr, HEAD_BLOCKS: gl.constexpr, SPLIT_BLOCKS: gl.constexpr,
):  # fmt: skip
    """All blocks of this program's items, from keys in shared memory to probabilities in shared memory.

    ``hand`` takes, for each of the two stages, bf16 probabilities [heads, keys] and per head the factor of what came
    before, the maximum and the total of the item so far, in base 2.
    """
    probabilities, keeps, tops, totals = hand
    full, ready, empty, noted = bars
    done = 0
    n, extra = item_lengths(rows, gl.program_id(0), SPLIT, HEAD_BLOCKS)
    _copy_query(q, q_strides, item_place(rows, gl.program_id(0), SPLIT, HEAD_BLOCKS), query)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        place = item_place(rows, item, SPLIT, HEAD_BLOCKS)
        first, count, splits = item_span(n, extra, place[4], SPLIT, SPLIT_BLOCKS)
        after = gl.minimum(item + gl.num_programs(0), items - 1)
        n, extra = item_lengths(rows, after, SPLIT, HEAD_BLOCKS)
        top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
        async_copy.wait_group(0)
        fence_async_shared()
        thread_barrier()
        for i in range(count):
            stage = done & 1
            mbarrier.wait(full.index(stage), (done >> 1) & 1)
            fence_async_shared()
            s = multiply(query, tiles, stage)
            s = warpgroup_mma_wait(0, deps=[s])
            if (i + 1 == count) & (item + gl.num_programs(0) < items):
                # The next item's queries come while this one's last softmax is made.
                thread_barrier()
                _copy_query(q, q_strides, item_place(rows, after, SPLIT, HEAD_BLOCKS), query)
            bias = gl.expand_dims(biases.index(stage).load(gl.SliceLayout(0, SCORES)), 0)
            s = gl.where(bias == 0.0, s, bias)
            p, keep, top = weigh(s, scale, top, block_maximum(s, scale))
            total = gl.fma(total, keep, gl.sum(p, 1))
            probabilities.index(stage).store(p.to(gl.bfloat16))
            keeps.index(stage).store(keep)
            tops.index(stage).store(top)
            totals.index(stage).store(total)
            mbarrier.arrive(ready.index(stage), count=1)
            done += 1
        if (count == 0) & (item + gl.num_programs(0) < items):
            _copy_query(q, q_strides, item_place(rows, after, SPLIT, HEAD_BLOCKS), query)
