"""Few rows on Hopper: two kernels that share a row among many programs, with the bits of the one for many rows.

The first makes scores of blocks of keys, the second weights of them, and adds up, a few columns a program. The second
is launched beside the first (programmatic dependent launch), decodes its keys meanwhile, and waits before it reads what
the first wrote.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from dsv4_triton.arguments import KeyList
from dsv4_triton.hopper_add import add_blocks
from dsv4_triton.hopper_layouts import BLOCK_N, HEADS
from dsv4_triton.hopper_score import score_blocks
from dsv4_triton.hopper_stream import SLICES, add_stream
from dsv4_triton.workload import LOG2E, Workload

#: registers of a thread by role; the default role gets what is left of what the whole is compiled for
SCORE = {
    1: {"SLOTS": 10, "SCORES_REGISTERS": 96, "DECODE_REGISTERS": 104},
    2: {"SLOTS": 4, "SCORES_REGISTERS": 96, "DECODE_REGISTERS": 104},
}
SCORE_OPTIONS = {"num_warps": 4, "maxnreg": 96}
#: The second kernel: one program a processor, for least time; two, which wait for memory in turns; or of 64 columns.
ADD = {
    "one": ({"COLUMNS": 32, "RING": 14, "AT_ONCE": 5, "AHEAD": 3, "PREPARE_REGISTERS": 168}, 168),
    "two": ({"COLUMNS": 32, "RING": 2, "AT_ONCE": 3, "AHEAD": 1, "PREPARE_REGISTERS": 80}, 80),
    "wide": ({"COLUMNS": 64, "RING": 6, "AT_ONCE": 9, "AHEAD": 3, "PREPARE_REGISTERS": 168}, 168),
}
STREAM = {
    1: {"SLOTS": 4, "STAGES": 3, "DEPTH": 4, "WEIGH_REGISTERS": 96, "KEYS_REGISTERS": 80},
    2: {"SLOTS": 4, "STAGES": 3, "DEPTH": 2, "WEIGH_REGISTERS": 88, "KEYS_REGISTERS": 56},
}
STREAM_OPTIONS = {"num_warps": 4, "maxnreg": 96}
PROGRAMS = {"one": 16, "two": 16, "wide": 8}
PROCESSORS = {"one": 16, "two": 8, "wide": 8}
OTHERWISE = "wide"
#: turns that programs of the last kind may take
TURNS = 1


def serves(work: Workload, heads: int, processors: int) -> bool:
    """Whether a call is better off here than as one program for 64 heads of a row. Either way it has the same bits."""
    return work.splits == 1 and work.rows * SLICES <= TURNS * processors


def launch_few(
    q: torch.Tensor,
    main: KeyList,
    extra: KeyList | None,
    work: Workload,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    lists: tuple[Any, ...],
    processors: int,
) -> None:
    """``hopper.launch`` for a call that ``serves`` takes; ``lists`` are both key lists as the kernels take them."""
    rows, halves = work.rows, q.shape[2] // HEADS
    row_blocks = triton.cdiv(main.width, BLOCK_N) + (triton.cdiv(extra.width, BLOCK_N) if extra else 0)
    kind, programs = shares(rows, halves, row_blocks, processors)
    blocks = rows * halves * row_blocks
    scores = torch.empty(blocks * HEADS * BLOCK_N, dtype=torch.float32, device=q.device)
    tops = torch.empty(blocks * HEADS, dtype=torch.float32, device=q.device)
    score_blocks[(rows * programs,)](
        q, *(n // 8 for n in q.stride()[:3]), scale * LOG2E, q.shape[1], programs, row_blocks, *lists, work.given,
        scores, tops, HEAD_BLOCKS=halves, **SCORE[halves], **SCORE_OPTIONS,
    )  # fmt: skip
    if kind == "stream":
        add_stream[(rows * SLICES,)](
            out, *(n // 8 for n in out.stride()[:3]), lse, *lse.stride(), work.sinks, q.shape[1], row_blocks,
            *lists, work.given, scores, tops, scale * LOG2E, HEAD_BLOCKS=halves, **STREAM[halves], **STREAM_OPTIONS,
            launch_pdl=True,
        )  # fmt: skip
        return
    constexprs, most = ADD[kind]
    add_blocks[(rows * halves * PROGRAMS[kind],)](
        out, *(n // 8 for n in out.stride()[:3]), lse, *lse.stride(), work.sinks, q.shape[1], row_blocks, halves,
        *lists, work.given, scores, tops, scale * LOG2E, **constexprs, num_warps=4, maxnreg=most, launch_pdl=True,
    )  # fmt: skip


def shares(rows: int, halves: int, row_blocks: int, processors: int) -> tuple[str, int]:
    """Kind of the second kernel, and programs a row of the first, so that both fit beside each other.

    A program for each block, where there is room; a few blocks less where that makes room; where it does not, the
    second kernel's programs have to wait for those of the first in any case.
    """
    if rows * halves * PROCESSORS[OTHERWISE] > processors:
        return "stream", max(1, min(row_blocks, processors // rows))
    kind = "one" if rows * row_blocks + rows * halves * PROCESSORS["one"] <= processors else OTHERWISE
    beside = (processors - rows * halves * PROCESSORS[kind]) // rows
    programs = beside if 2 * beside >= row_blocks else processors // rows
    return kind, max(1, min(row_blocks, programs))
