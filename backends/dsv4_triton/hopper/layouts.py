"""Sizes and layouts that the parts of the Hopper kernel share: how tiles lie in registers and in shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4_triton import workload

#: keys a block
BLOCK_N = 64
#: query heads an item
HEADS = 64
#: as ``workload`` lays out the workspace: 512 sums, the maximum, the total, two of padding
PARTIAL_WORDS = gl.constexpr(workload.PARTIAL_WORDS)
#: Blocks whose places are noted at once: the one that is decoded, the one behind it whose bytes are on their way, the
#: one that is noted meanwhile, and one between the two.
NOTED = gl.constexpr(4)

BLOCK = gl.constexpr(BLOCK_N)
#: blocks of a row that the kernels for few rows take: those of one split
MOST_BLOCKS = gl.constexpr(20)
TOP_BITS = gl.constexpr(0x80808080 - (1 << 32))  # as int32
# Scores [64 heads, 64 keys] and sums [64 heads, 128 columns] as wgmma lays them out over four warps. 256 columns in one
# instruction would need more registers than 16 warps can be compiled for.
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
SWIZZLED_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PLAIN_2D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
# [keys, words of a group of 64 bytes]: four lanes fetch a key's group in 16-byte pieces, sixteen keys a warp.
WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [BLOCK_N, 16]
    )
)
KEYS = gl.constexpr(gl.SliceLayout(1, WORDS))
# The same without words: [keys, pieces of 16 bytes of a group].
PIECES = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [BLOCK_N, 4])
)
PIECE_KEYS = gl.constexpr(gl.SliceLayout(1, PIECES))
# Notes of a block, [keys, groups]: two lanes a key, each with the factors of four groups.
NOTES = gl.constexpr(gl.BlockedLayout([1, 4], [16, 2], [4, 1], [1, 0]))
PLACES = gl.constexpr(gl.SliceLayout(1, NOTES))
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# The same two for eight warps: each thread has a piece of one key.
WORDS_8 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0], [32, 0]], [], [BLOCK_N, 16]
    )
)
PIECES_8 = gl.constexpr(
    gl.DistributedLinearLayout(
        [], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0], [32, 0]], [], [BLOCK_N, 4]
    )
)
# Scores of 64 heads and 64 keys in memory, [4096]: 16 bytes of every thread of four warps for each 8 keys.
STORED_SCORES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1], [2], [512], [1024], [2048]], [[4], [8], [16], [32], [64]], [[128], [256]], [], [4096]
    )
)
# Weights in shared memory, [4096], as wgmma takes a first operand: 16 bytes of every thread for each 16 keys.
WEIGHTS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1], [2], [4], [1024], [2048]], [[8], [16], [32], [64], [128]], [[256], [512]], [], [4096]
    )
)
# As WORDS and PIECES, 32 bytes of 128 keys.
WORDS_32 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [64, 0]], [[0, 4], [1, 0], [2, 0], [4, 0], [8, 0]], [[16, 0], [32, 0]], [], [2 * BLOCK_N, 8]
    )
)
PIECES_32 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[64, 0]], [[0, 1], [1, 0], [2, 0], [4, 0], [8, 0]], [[16, 0], [32, 0]], [], [2 * BLOCK_N, 2]
    )
)
# Queries and outputs [heads, channels] in pieces of 16 bytes.
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))

# Triton 3.7 renamed it.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def here():
    """What is loaded above it is asked for there: the assembler moves loads down to the next barrier if it may.

    Lanes of a warp that are together anyway need no instruction to come together, only a place that loads do not pass.
    """
    gl.inline_asm_elementwise("bar.warp.sync 0xffffffff; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def launch_dependents():
    """The next kernel may be launched beside this one, as soon as all programs have said so."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_previous():
    """What the previous kernel wrote is there, when this returns.

    The barrier is for the compiler, which may move loads across assembly, but not across a barrier.
    """
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    thread_barrier()
