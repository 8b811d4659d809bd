"""Few rows on Hopper: two kernels that share a row among many programs, with the bits of the one for many rows.

The first makes weights of blocks of keys, the second adds up weights times keys, a few columns a program; it is launched
beside the first one (programmatic dependent launch) and waits for it before it reads what that one wrote.
"""

from __future__ import annotations

import torch
import triton

from dsv4_triton.arguments import KeyList
from dsv4_triton.hopper_add import RING, STAGES, add_blocks
from dsv4_triton.hopper_layouts import BLOCK_N, HEADS
from dsv4_triton.hopper_weigh import weigh_blocks
from dsv4_triton.workload import LOG2E, Workload

CONFIG = {"columns": None, "per": None, "most": 40}


def launch_few(q, main, extra, work, scale, out, lse, lists, processors):
    heads, seq = q.shape[2], q.shape[1]
    head_blocks = heads // HEADS
    row_blocks = triton.cdiv(main.width, BLOCK_N) + (triton.cdiv(extra.width, BLOCK_N) if extra else 0)
    weights = torch.empty(work.rows * head_blocks * row_blocks * 4096, dtype=torch.bfloat16, device=q.device)
    stats = torch.empty(work.rows * head_blocks * row_blocks * 192, dtype=torch.float32, device=q.device)
    programs = CONFIG["per"] or max(1, min(row_blocks, processors // work.rows))
    items = work.rows * head_blocks
    columns = CONFIG["columns"] or (64 if items * 8 <= processors else 128)
    gather, join = {64: (80, 104), 128: (80, 80)}[columns]
    weigh_blocks[(work.rows * programs,)](
        q, *(n // 8 for n in q.stride()[:3]), scale * LOG2E, seq, programs, row_blocks, *lists, work.given, weights,
        stats, HEAD_BLOCKS=head_blocks, SCORES_REGISTERS=112, GATHER_REGISTERS=136, num_warps=4, maxnreg=128,
    )  # fmt: skip
    add_blocks[(items * (512 // columns),)](
        out, *(n // 8 for n in out.stride()[:3]), lse, *lse.stride(), work.sinks, seq, row_blocks, head_blocks, *lists,
        work.given, weights, stats, COLUMNS=columns, STAGES=STAGES[columns], RING=RING, GATHER_REGISTERS=gather,
        JOIN_REGISTERS=join, num_warps=8, maxnreg=96, launch_pdl=True,
    )  # fmt: skip
