# ruff: noqa: N803 - constexpr names are upper case
"""Sparse FP8 attention for Hopper in Gluon: warps that hand blocks of keys to each other in shared memory.

One item of work is (query row, 64 heads, split); a block is 64 keys. For each block
``producer`` (8 warps) gathers packed rows in 16-byte pieces, decodes e4m3 to bf16 in registers and leaves 512 columns
in shared memory; the next block's bytes are asked for as soon as that is done;
``left`` (4 warps) computes the scores, the online softmax and output columns 0..255;
``right`` (4 warps) computes columns 256..511 from the probabilities that ``left`` leaves in shared memory.

A row's bits depend on its lists and lengths alone, cut into blocks and splits of fixed size, as in
``attention_kernel``. The grid only decides who works on what: a program takes items ``pid, pid + programs, ...``, so
that the next item's first keys and queries arrive while the last one drains.

Keys that do not count are zeros with a bias of -inf. A key with an e4m3 NaN has a bias of NaN, which the softmax
spreads to every head and column, as NaN * q would; a scale byte of 255 becomes a factor of NaN and does so by itself.

Shared memory is written by ordinary stores and read by wgmma, through another proxy. The fence between the two stands
behind the reader's wait: in the producer it would also wait for the loads of the next block.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dsv4_triton.hopper_consumers import left, right
from dsv4_triton.hopper_layouts import BLOCK, PLAIN, STAGES, SWIZZLED, thread_barrier
from dsv4_triton.hopper_producer import producer


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
    RIGHT_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Arguments as ``attention_kernel.attend`` has them, but strides of q, out and pages count 16-byte pieces, pages
    have ``1 << shift`` entries, and ``items`` is how many there are.
    """
    query = (
        gl.allocate_shared_memory(gl.bfloat16, [64, 128], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [64, 128], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [64, 128], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [64, 64], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [64, 64], SWIZZLED),
    )
    keys = (
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, 128], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, 128], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, 128], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, 64], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, 64], SWIZZLED),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], PLAIN),
    )
    hand = (
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, BLOCK], SWIZZLED),
        gl.allocate_shared_memory(gl.float32, [STAGES, 64], PLAIN),
        gl.allocate_shared_memory(gl.float32, [64], PLAIN),
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    finished = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    seen = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(taken.index(i), count=1)
    mbarrier.init(finished, count=1)
    mbarrier.init(seen, count=1)
    fence_async_shared()
    thread_barrier()
    rows = (lengths, extra_lengths, width, extra_width, given, seq, first_row, splits)
    words = cache.to(gl.pointer_type(gl.int32), bitcast=True)
    extra_words = extra_cache.to(gl.pointer_type(gl.int32), bitcast=True)
    lists = (
        words, extra_words, shift, extra_shift, stride, extra_stride, capacity, extra_capacity,
    )  # fmt: skip
    strides = (q_b, q_s, q_h)
    output = (out, o_b, o_s, o_h)
    lse_output = (lse, l_b, l_s, l_h)
    indices = (index, extra_index, i_b, i_s, e_b, e_s)
    bars = (full, empty)
    hand_bars = (ready, taken, finished, seen)
    heads = HEAD_BLOCKS * 64
    gl.warp_specialize(
        [
            (
                left,
                (
                    q, strides, output, lse_output, sink, rows, scale, heads, partial, splits, query, keys, hand, bars,
                    hand_bars, items, SPLIT, HEAD_BLOCKS, SPLIT_BLOCKS,
                ),
            ),
            (
                right,
                (
                    output, rows, heads, partial, splits, keys, hand, bars, hand_bars, items,
                    SPLIT, HEAD_BLOCKS, SPLIT_BLOCKS,
                ),
            ),
            (producer, (rows, lists, indices, keys, bars, items, SPLIT, HEAD_BLOCKS, SPLIT_BLOCKS)),
        ],
        [4, 8],
        [RIGHT_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
