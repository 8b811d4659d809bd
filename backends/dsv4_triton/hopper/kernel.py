# ruff: noqa: N803 - constexpr names are upper case
"""Sparse FP8 attention for Hopper in Gluon: warps that hand blocks of keys to each other in shared memory.

One item of work is (query row, 64 heads, split); a block is 64 keys. Four roles of four warps:
``gather`` fetches packed rows in 16-byte pieces, decodes e4m3 to bf16 in registers and leaves them in shared memory;
``scores`` multiplies them with the queries and has the online softmax;
``sums`` twice, for half of the columns each, adds up probabilities times keys; one of them notes for ``gather`` where
coming keys are.

A row's bits depend on its lists and lengths alone, cut into blocks and splits of fixed size, as in
``attention_kernel``. The grid only decides who works on what: a program takes items ``pid, pid + programs, ...``, so
that the next item's first keys arrive while the last one drains.

Keys that do not count are zeros with a score of -inf. A key with an e4m3 NaN has a score of NaN, which the softmax
spreads to every head and column, as NaN * q would; a scale byte of 255 becomes a factor of NaN and does so by itself.

Shared memory is written by ordinary stores and read by wgmma, through another proxy. The fence between the two stands
behind the reader's wait: in ``gather`` it would also wait for the loads of the next block.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dsv4_triton.hopper.keys import gather
from dsv4_triton.hopper.layouts import BLOCK, NOTED, PLAIN, PLAIN_2D, SWIZZLED, thread_barrier
from dsv4_triton.hopper.notes import lists_of
from dsv4_triton.hopper.scores import scores
from dsv4_triton.hopper.sums import sums

FIRST = gl.constexpr(0)
SECOND = gl.constexpr(1)


@gluon.jit(do_not_specialize=[
    "seq", "q_b", "q_s", "q_h", "o_b", "o_s", "o_h", "l_b", "l_s", "l_h", "i_b", "i_s", "e_b", "e_s",
    "width", "extra_width", "given", "shift", "extra_shift", "stride", "extra_stride", "capacity", "extra_capacity",
    "first_row", "splits", "items",
], do_not_specialize_on_alignment=[
    "lse", "sink", "index", "lengths", "extra_index", "extra_lengths", "partial",
])  # fmt: skip
def attend(
    q, q_b, q_s, q_h, out, o_b, o_s, o_h, lse, l_b, l_s, l_h, sink, scale, seq, first_row, items,
    cache, shift, stride, capacity, index, i_b, i_s, lengths, width,
    extra_cache, extra_shift, extra_stride, extra_capacity, extra_index, e_b, e_s, extra_lengths, extra_width,
    given, partial, splits,
    SPLIT: gl.constexpr, HEAD_BLOCKS: gl.constexpr, SPLIT_BLOCKS: gl.constexpr,
    SUMS_REGISTERS: gl.constexpr, SCORES_REGISTERS: gl.constexpr, GATHER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Arguments as ``attention_kernel.attend`` has them, but strides of q, out and pages count 16-byte pieces, pages
    have ``1 << shift`` entries, and ``items`` is how many there are.
    """
    query = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], SWIZZLED)
    tiles = (
        gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, 128], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, 128], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, 128], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, 128], SWIZZLED),
    )
    biases = gl.allocate_shared_memory(gl.float32, [2, BLOCK], PLAIN)
    hand = (
        gl.allocate_shared_memory(gl.bfloat16, [2, 64, BLOCK], SWIZZLED),
        gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN),
        gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN),
        gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN),
    )
    notes = (
        gl.allocate_shared_memory(gl.int64, [NOTED, BLOCK], PLAIN),
        gl.allocate_shared_memory(gl.int32, [NOTED, 8, BLOCK], PLAIN_2D),
        gl.allocate_shared_memory(gl.float32, [NOTED, BLOCK], PLAIN),
        gl.allocate_shared_memory(gl.int32, [NOTED, 1], PLAIN),
        gl.allocate_shared_memory(gl.int32, [NOTED, 1], PLAIN),
    )
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    noted = gl.allocate_shared_memory(gl.int64, [NOTED, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(NOTED):
        mbarrier.init(noted.index(i), count=1)
    fence_async_shared()
    thread_barrier()
    rows = (lengths, extra_lengths, width, extra_width, given, seq, first_row, splits)
    lists = lists_of(cache, shift, stride, capacity, extra_cache, extra_shift, extra_stride, extra_capacity)
    strides = (q_b, q_s, q_h)
    output = (out, o_b, o_s, o_h)
    lse_output = (lse, l_b, l_s, l_h)
    indices = (index, extra_index, i_b, i_s, e_b, e_s)
    bars = (full, ready, empty, noted)
    heads = HEAD_BLOCKS * 64
    gl.warp_specialize(
        [
            (
                sums,
                (
                    SECOND, output, lse_output, sink, rows, heads, partial, splits, lists, indices, tiles, hand, notes,
                    bars, items, SPLIT, HEAD_BLOCKS, SPLIT_BLOCKS,
                ),
            ),
            (
                sums,
                (
                    FIRST, output, lse_output, sink, rows, heads, partial, splits, lists, indices, tiles, hand, notes,
                    bars, items, SPLIT, HEAD_BLOCKS, SPLIT_BLOCKS,
                ),
            ),
            (
                scores,
                (
                    q, strides, rows, scale, query, tiles, biases, hand, bars, items,
                    SPLIT, HEAD_BLOCKS, SPLIT_BLOCKS,
                ),
            ),
            (gather, (tiles, biases, notes, bars, items)),
        ],
        [4, 4, 4],
        [SUMS_REGISTERS, SCORES_REGISTERS, GATHER_REGISTERS],
    )  # fmt: skip
