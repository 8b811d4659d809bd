"""Sizes and layouts that the parts of the Hopper kernel share: how tiles lie in registers and in shared memory."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

#: keys a block, and blocks in shared memory
BLOCK_N = 64
STAGES = gl.constexpr(2)
#: query heads an item
HEADS = 64
PRODUCER_WARPS = 8
#: words of fp32 that a split leaves for ``combine``: 512 sums, the maximum, the total, two of padding
PARTIAL_WORDS = gl.constexpr(516)

BLOCK = gl.constexpr(BLOCK_N)
TOP_BITS = gl.constexpr(0x80808080 - (1 << 32))  # as int32
# Scores [64 heads, 64 keys] and sums [64 heads, 128 or 64 columns] as wgmma lays them out over four warps. 256 columns
# in one instruction would need more registers than 16 warps can be compiled for.
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
SUMS_128 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
SUMS_64 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
SWIZZLED_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# [rows, groups of 64 bytes, words]: four lanes fetch a row's group in 16-byte pieces, eight rows a warp.
WORDS = gl.constexpr(gl.BlockedLayout([1, 1, 4], [8, 1, 4], [PRODUCER_WARPS, 1, 1], [2, 1, 0]))
ROWS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))
# The same rows in the same threads, for the rope's 32 words.
ROPE_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [PRODUCER_WARPS, 1], [1, 0]))
# 16-byte pieces of bf16 rows of 64 columns.
PIECES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))

# Triton 3.7 renamed it.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
