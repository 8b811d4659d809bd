"""What a launch of attention comes down to, whichever kernel serves it: splits, workspace, and arguments left out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from dsv4_triton.arguments import KeyList
from dsv4_triton.geometry import HEAD_DIM

#: fp32 words a (row, split, head) leaves in the workspace: the accumulator, its maximum, its sum, padding to 16 bytes
PARTIAL_WORDS = HEAD_DIM + 4
#: Bound of the workspace. Longer batches run in chunks of rows, one after the other in the same workspace.
WORKSPACE_BYTES = 512 * 1024 * 1024
#: scores are kept in base 2, as exp2 is what hardware has
LOG2E = 1.4426950408889634
#: heads a combine program takes
COMBINE_HEADS = 4


@dataclass(frozen=True)
class Workload:
    """Arguments of a launch that follow from those of the call.

    Attributes:
        rows: query rows; of them ``chunk`` are served by a launch.
        blocks, splits: that the longest possible row has.
        partial: fp32 workspace of ``chunk * splits * heads * PARTIAL_WORDS`` words; any tensor if there is one split.
        other: the second key list, the first one again where there is none.
        lengths, extra_lengths: int32 ``[b]``; any int32 tensor in place of one that is not given.
        extra_width: entries of the second list, 0 where there is none.
        given: bit 0: lengths are given; bit 1: extra_lengths; bit 2: a sink.
        sinks: fp32 ``[H]``; any fp32 tensor in place of one that is not given.
    """

    rows: int
    chunk: int
    blocks: int
    splits: int
    partial: torch.Tensor
    other: KeyList
    lengths: torch.Tensor
    extra_lengths: torch.Tensor
    extra_width: int
    given: int
    sinks: torch.Tensor


def workload(
    q: torch.Tensor,
    main: KeyList,
    extra: KeyList | None,
    sink: torch.Tensor | None,
    lse: torch.Tensor,
    block_n: int,
    split_blocks: int,
) -> Workload:
    """For ``q`` bf16 ``[b, s_q, H, 512]`` and splits of ``split_blocks`` blocks of ``block_n`` keys.

    Reads no tensor's value.
    """
    rows, heads = q.shape[0] * q.shape[1], q.shape[2]
    blocks = triton.cdiv(main.width, block_n) + (triton.cdiv(extra.width, block_n) if extra else 0)
    splits = max(1, triton.cdiv(blocks, split_blocks))
    chunk, partial = rows, lse
    if splits > 1:
        row_bytes = splits * heads * PARTIAL_WORDS * 4
        chunk = min(rows, max(1, WORKSPACE_BYTES // row_bytes))
        partial = torch.empty(chunk * row_bytes // 4, dtype=torch.float32, device=q.device)
    other = main if extra is None else extra
    lengths = main.indices if main.lengths is None else main.lengths
    optional = (main.lengths, None if extra is None else extra.lengths, sink)
    return Workload(
        rows=rows,
        chunk=chunk,
        blocks=blocks,
        splits=splits,
        partial=partial,
        other=other,
        lengths=lengths,
        extra_lengths=lengths if other.lengths is None else other.lengths,
        extra_width=0 if extra is None else extra.width,
        given=sum(1 << bit for bit, x in enumerate(optional) if x is not None),
        sinks=lse if sink is None else sink,
    )
