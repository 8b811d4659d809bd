"""Few rows on Hopper: two kernels that share a row among many programs, with the bits of the one for many rows.

The first makes scores of blocks of keys, the second weights of them, and adds up, some columns a program. The second
is launched beside the first (programmatic dependent launch) and waits before it reads what the first wrote; where
there is room for both it has decoded its keys meanwhile. An item is a row or, of a row of several splits, one of these.
"""

from __future__ import annotations

from typing import Any

import torch

from dsv4_triton.hopper.few_rows.add import add_blocks
from dsv4_triton.hopper.few_rows.score import score_blocks
from dsv4_triton.hopper.few_rows.score_once import score_once
from dsv4_triton.hopper.few_rows.stream import SLICES, add_stream
from dsv4_triton.hopper.few_rows.weights import NUMBERS
from dsv4_triton.hopper.layouts import BLOCK_N, HEADS, MOST_BLOCKS
from dsv4_triton.workload import LOG2E, Workload

#: The first kernel by blocks of 64 heads: slots of its ring, registers of a thread by role. The default role gets what
#: is left of what the whole is compiled for.
SCORE = {
    1: {"SLOTS": 10, "SCORES_REGISTERS": 96, "DECODE_REGISTERS": 104},
    2: {"SLOTS": 4, "SCORES_REGISTERS": 96, "DECODE_REGISTERS": 104},
}
SCORE_OPTIONS = {"num_warps": 4, "maxnreg": 96}
#: The same where every block has a program.
ONCE = {"GATHER_REGISTERS": 120, "SCORES_REGISTERS": 136}
ONCE_OPTIONS = {"num_warps": 4, "maxnreg": 128}
#: Kinds of the second, a program for each slice of 64 heads: of 32 columns for least time, of 64 for more rows.
ADD = {
    "narrow": {"COLUMNS": 32, "WEIGH_REGISTERS": 168},
    "wide": {"COLUMNS": 64, "WEIGH_REGISTERS": 168},
}
ADD_OPTIONS = {"num_warps": 4, "maxnreg": 168}
#: One of its programs fills a processor.
PROGRAMS = {kind: 512 // constexprs["COLUMNS"] for kind, constexprs in ADD.items()}
#: Of 128 columns of all heads of a row, for still more: by blocks of 64 heads, as above. Slots are of raw keys, stages
#: of tiles, the ring of scores; with 64 heads the one role that adds up gets what is left.
STREAM = {
    1: {"SLOTS": 4, "STAGES": 3, "RING": 6, "ADD_REGISTERS": 168, "KEYS_REGISTERS": 104},
    2: {"SLOTS": 4, "STAGES": 3, "RING": 3, "ADD_REGISTERS": 168, "KEYS_REGISTERS": 88},
}
STREAM_OPTIONS = {1: {"num_warps": 4, "maxnreg": 168}, 2: {"num_warps": 4, "maxnreg": 128}}


def serves(work: Workload, processors: int) -> bool:
    """Whether a call is better off here than as one program for 64 heads of a row. Either way it has the same bits."""
    return work.rows == work.chunk and work.rows * work.splits * SLICES <= processors


def launch_few(
    q: torch.Tensor,
    work: Workload,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    lists: tuple[Any, ...],
    processors: int,
) -> None:
    """``hopper.launch`` for a call that ``serves`` takes; ``lists`` are both key lists as the kernels take them."""
    items, halves = work.rows * work.splits, q.shape[2] // HEADS
    row_blocks = min(work.blocks, MOST_BLOCKS.value)
    kind, programs = shares(items, halves, row_blocks, processors)
    counts = torch.empty(items * halves, dtype=torch.int32, device=q.device)
    blocks = items * halves * row_blocks
    scores = torch.empty(blocks * HEADS * BLOCK_N, dtype=torch.float32, device=q.device)
    tops = torch.empty(blocks * HEADS, dtype=torch.float32, device=q.device)
    queries = (q, *(n // 8 for n in q.stride()[:3]), scale * LOG2E, q.shape[1])
    keys = (row_blocks, work.splits, *lists, work.given, scores, tops, counts)
    split, named = work.splits > 1, {"HEAD_BLOCKS": halves}
    if programs == row_blocks:
        score_once[(items * row_blocks,)](*queries, *keys, SPLIT=split, **named, **ONCE, **ONCE_OPTIONS)
    else:
        score_blocks[(items * programs,)](
            *queries, programs, *keys, SPLIT=split, **named, **SCORE[halves], **SCORE_OPTIONS
        )
    output = (out, *(n // 8 for n in out.stride()[:3]), lse, *lse.stride(), work.sinks, q.shape[1], row_blocks)
    output = (*output, work.splits, work.partial)
    held = (*lists, work.given, scores, tops, scale * LOG2E)
    if kind == "stream":
        add_stream[(items * SLICES,)](
            *output, *held, SPLIT=split, **named, **STREAM[halves], **STREAM_OPTIONS[halves], launch_pdl=True
        )
    else:
        weights = torch.empty(blocks * HEADS * BLOCK_N, dtype=torch.bfloat16, device=q.device)
        numbers = torch.empty(blocks * NUMBERS.value * HEADS, dtype=torch.float32, device=q.device)
        add_blocks[(items * halves * PROGRAMS[kind],)](
            *output, halves, *held, weights, numbers, counts, makers(items, halves, kind, programs, processors),
            SPLIT=split, **ADD[kind], **ADD_OPTIONS, launch_pdl=True,
        )  # fmt: skip


def shares(items: int, halves: int, row_blocks: int, processors: int) -> tuple[str, int]:
    """Kind of the second kernel, and programs an item of the first: one for each block, where there is room for them.

    Programs of the second for which there is no room beside those wait for them. That costs less than blocks of the
    first that wait for each other: nothing of the second can end before all of the first has.
    """
    programs = max(1, min(row_blocks, processors // items))
    if items * halves * PROGRAMS["wide"] > processors:
        return "stream", programs
    if items * (row_blocks + halves * PROGRAMS["narrow"]) <= processors:
        return "narrow", programs
    return "wide", programs


def makers(items: int, halves: int, kind: str, programs: int, processors: int) -> int:
    """Roles that make weights of 64 heads of a row for all of their programs: two a program, of the first half of these
    where not all have a place beside the first kernel, so that nobody waits for one that waits for its place.
    """
    beside = items * (programs + halves * PROGRAMS[kind]) <= processors
    return 2 * PROGRAMS[kind] if beside else PROGRAMS[kind]
