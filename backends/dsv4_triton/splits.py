# ruff: noqa: N803 - constexpr names are upper case, and Triton compiles a subset of Python
"""How a row's keys fall into splits, and how a row is finished: shared by the attention kernel and ``combine``.

Both have to agree on every count, so both compute it here, from the row's own clamped lengths.
"""

from __future__ import annotations

import triton.language as tl

from dsv4_triton.numerics import LN2, LOG2E, device_function


@device_function
def row_blocks(length, extra_length, BLOCK_N: tl.constexpr, SPLIT_BLOCKS: tl.constexpr):
    """Blocks of the main list, blocks of both, and splits of a row: functions of its own clamped lengths."""
    main_blocks = (length + BLOCK_N - 1) // BLOCK_N
    blocks = main_blocks + (extra_length + BLOCK_N - 1) // BLOCK_N
    splits = tl.maximum((blocks + SPLIT_BLOCKS - 1) // SPLIT_BLOCKS, 1)
    return main_blocks, blocks, splits


@device_function
def row_length(lengths, width, given, at):
    """A row's list length, clamped to [0, width]; the full width where no lengths are given."""
    n = tl.load(lengths + at, mask=given != 0, other=width)
    return tl.minimum(tl.maximum(n, 0), width)


@device_function
def normaliser(top, total, sink):
    """Factor of the output and natural-log lse of a row: 0 and +inf without keys; the sink counts for the first only.

    ``total == 0`` tells an empty row, and is false for NaN: a poisoned row must come out as NaN, not as zero.
    """
    empty = total == 0.0
    denominator = tl.where(empty, 1.0, total + tl.exp2(sink * LOG2E - tl.where(empty, 0.0, top)))
    factor = tl.where(empty, 0.0, 1.0 / denominator)
    lse = tl.where(empty, float("inf"), (top + tl.log2(tl.where(empty, 1.0, total))) * LN2)
    return factor, lse
