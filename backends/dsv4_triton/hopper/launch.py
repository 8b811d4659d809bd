"""Launching the Hopper kernels: arguments in their units, a grid of as many programs as there are processors.

Nothing here reads a tensor's value. Rows of several splits go through the workspace and ``combine`` as on every target.
"""

from __future__ import annotations

from functools import cache

import torch

from dsv4_triton.arguments import KeyList
from dsv4_triton.combine import combine
from dsv4_triton.hopper.few_rows.launch import launch_few, serves
from dsv4_triton.hopper.kernel import attend
from dsv4_triton.hopper.layouts import BLOCK_N, HEADS
from dsv4_triton.target import launching_on
from dsv4_triton.workload import COMBINE_HEADS, LOG2E, workload

#: Keys a split: the largest selection of a decode row (128 + 1024) is one split, and 8192 compressed entries are seven.
SPLIT_KEYS = 1280
SPLIT_BLOCKS = SPLIT_KEYS // BLOCK_N
#: Registers of a thread by role; the ``sums`` that keeps the notes gets what is left of 128 a thread: 168. With Triton
#: 3.6 loops over keys of one split hardly touch local memory, which this kernel cannot afford (docs/performance.md).
REGISTERS = {"SUMS_REGISTERS": 160, "SCORES_REGISTERS": 80, "GATHER_REGISTERS": 104}
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
    work = workload(q, main, extra, sink, lse, BLOCK_N, SPLIT_BLOCKS)
    other, seq, heads = work.other, q.shape[1], q.shape[2]
    index = q.device.index if q.device.index is not None else torch.cuda.current_device()
    lists = (
        *_addressing(main), main.indices, *main.indices.stride()[:2], work.lengths, main.width,
        *_addressing(other), other.indices, *other.indices.stride()[:2], work.extra_lengths, work.extra_width,
    )  # fmt: skip
    with launching_on(q):
        few = serves(work, processors(index))
        for first in range(0, work.rows, work.chunk):
            count = min(work.chunk, work.rows - first)
            items = count * work.splits * (heads // HEADS)
            if few:
                launch_few(q, work, scale, out, lse, lists, processors(index))
            else:
                attend[(min(items, processors(index)),)](
                    q, *(n // 8 for n in q.stride()[:3]), out, *(n // 8 for n in out.stride()[:3]), lse, *lse.stride(),
                    work.sinks, scale * LOG2E, seq, first, items, *lists, work.given, work.partial, work.splits,
                    SPLIT=work.splits > 1, HEAD_BLOCKS=heads // HEADS, SPLIT_BLOCKS=SPLIT_BLOCKS,
                    **REGISTERS, **OPTIONS,
                )  # fmt: skip
            if work.splits > 1:
                combine[(count, heads // COMBINE_HEADS)](
                    work.partial, work.splits, out, *out.stride()[:3], lse, *lse.stride(), work.sinks,
                    seq, heads, first, work.lengths, main.width, work.extra_lengths, work.extra_width, work.given,
                    ALIGNED=True, BLOCK_N=BLOCK_N, SPLIT_BLOCKS=SPLIT_BLOCKS, HEADS=COMBINE_HEADS,
                    num_warps=4, enable_fp_fusion=True,
                )  # fmt: skip


def _addressing(keys: KeyList) -> tuple[torch.Tensor, int, int, int]:
    """Cache, log2 of the entries a page, page stride in pieces of 16 bytes, slots."""
    pages, page = keys.keys.shape[:2]
    return keys.keys, page.bit_length() - 1, keys.keys.stride(0) // 16, min(pages * page, 2**31 - 1)
