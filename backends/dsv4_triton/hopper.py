"""Launching the Hopper kernel: arguments in its units, a grid of as many programs as there are processors.

Nothing here reads a tensor's value. Rows of several splits go through the workspace and ``combine`` as on every target.
"""

from __future__ import annotations

from functools import cache

import torch
import triton

from dsv4_triton.arguments import KeyList
from dsv4_triton.combine import combine
from dsv4_triton.hopper_kernel import attend
from dsv4_triton.hopper_layouts import BLOCK_N, HEADS
from dsv4_triton.target import launching_on

LOG2E = 1.4426950408889634
#: Keys a split: the largest selection of a decode row (128 + 1024) is one split, and 8192 compressed entries are seven.
SPLIT_KEYS = 1280
SPLIT_BLOCKS = SPLIT_KEYS // BLOCK_N
#: fp32 words a (row, split, head) leaves in the workspace, as ``combine`` reads them
PARTIAL_WORDS = 516
#: Bound of the workspace. Longer batches run in chunks of rows, one after the other in the same workspace.
WORKSPACE_BYTES = 512 * 1024 * 1024
COMBINE_HEADS = 4
#: Registers of a thread by role; the ``sums`` that keeps the notes gets what is left of 128 a thread: 168. With Triton
#: 3.6 no loop over keys of one split touches local memory, which this kernel cannot afford (docs/performance.md).
REGISTERS = {"SUMS_REGISTERS": 160, "SCORES_REGISTERS": 88, "GATHER_REGISTERS": 96}
#: warps of the default role, and what the whole is compiled for
OPTIONS = {"num_warps": 4, "maxnreg": 128}


@cache
def processors(index: int) -> int:
    """Multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def launch(
    q: torch.Tensor,
    main: KeyList,
    extra: KeyList | None,
    sink: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """``attention.launch`` for arguments that ``choice.choose`` gives to this kernel."""
    batch, seq, heads, _ = q.shape
    rows = batch * seq
    blocks = triton.cdiv(main.width, BLOCK_N) + (triton.cdiv(extra.width, BLOCK_N) if extra else 0)
    splits = max(1, triton.cdiv(blocks, SPLIT_BLOCKS))
    chunk, partial = rows, lse
    if splits > 1:
        row_bytes = splits * heads * PARTIAL_WORDS * 4
        chunk = min(rows, max(1, WORKSPACE_BYTES // row_bytes))
        partial = torch.empty(chunk * row_bytes // 4, dtype=torch.float32, device=q.device)
    other = main if extra is None else extra
    lengths = main.indices if main.lengths is None else main.lengths
    extra_lengths = lengths if other.lengths is None else other.lengths
    extra_width = 0 if extra is None else extra.width
    optional = (main.lengths, None if extra is None else extra.lengths, sink)
    given = sum(1 << bit for bit, x in enumerate(optional) if x is not None)
    sinks = lse if sink is None else sink
    head_blocks = heads // HEADS
    index = q.device.index if q.device.index is not None else torch.cuda.current_device()
    with launching_on(q):
        for first in range(0, rows, chunk):
            count = min(chunk, rows - first)
            items = count * splits * head_blocks
            attend[(min(items, processors(index)),)](
                q, *(n // 8 for n in q.stride()[:3]), out, *(n // 8 for n in out.stride()[:3]), lse, *lse.stride(),
                sinks, scale * LOG2E, seq, first, items,
                *_addressing(main), main.indices, *main.indices.stride()[:2], lengths, main.width,
                *_addressing(other), other.indices, *other.indices.stride()[:2], extra_lengths, extra_width,
                given, partial, splits,
                SPLIT=splits > 1, HEAD_BLOCKS=head_blocks, SPLIT_BLOCKS=SPLIT_BLOCKS,
                **REGISTERS, **OPTIONS,
            )  # fmt: skip
            if splits > 1:
                combine[(count, heads // COMBINE_HEADS)](
                    partial, splits, out, *out.stride()[:3], lse, *lse.stride(), sinks, seq, heads, first,
                    lengths, main.width, extra_lengths, extra_width, given,
                    ALIGNED=True, BLOCK_N=BLOCK_N, SPLIT_BLOCKS=SPLIT_BLOCKS, HEADS=COMBINE_HEADS,
                    num_warps=4, enable_fp_fusion=True,
                )  # fmt: skip


def _addressing(keys: KeyList) -> tuple[torch.Tensor, int, int, int]:
    """Cache, log2 of the entries a page, page stride in pieces of 16 bytes, slots."""
    pages, page = keys.keys.shape[:2]
    return keys.keys, page.bit_length() - 1, keys.keys.stride(0) // 16, min(pages * page, 2**31 - 1)
