# ruff: noqa: N803 - constexpr names are upper case, and Triton compiles a subset of Python
"""Joins the splits of a row: one program per (row, a few heads), reading the splits that the row itself needs.

Splits are taken in ascending order with the arithmetic of the attention loop, so the result is a function of the row
alone, and one split with keys among empty ones gives the bits that it would have written directly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4_triton.numerics import fp32_to_bf16
from dsv4_triton.splits import normaliser, row_blocks, row_length


@triton.jit(do_not_specialize=[
    "seq", "heads", "o_b", "o_s", "o_h", "l_b", "l_s", "l_h", "width", "extra_width", "given", "first_row",
    "partial_splits",
], do_not_specialize_on_alignment=["lse", "sink", "lengths", "extra_lengths"])  # fmt: skip
def combine(
    partial, partial_splits, out, o_b, o_s, o_h, lse, l_b, l_s, l_h, sink, seq, heads, first_row,
    lengths, width, extra_lengths, extra_width, given,
    ALIGNED: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_BLOCKS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Join a row's splits in ascending order: one program per (row, HEADS heads), idle where the row had one split.

    Only splits that the row's own lengths call for are read; the rest of the workspace was never written. A split
    without keys has weight exactly 0 and zeros for its sum, so trailing padding leaves the bits alone.
    """
    local = tl.program_id(0)
    row = local + first_row
    b = (row // seq).to(tl.int64)
    s = (row % seq).to(tl.int64)
    length = row_length(lengths, width, given & 1, b)
    extra_length = row_length(extra_lengths, extra_width, given & 2, b)
    _, _, splits = row_blocks(length, extra_length, BLOCK_N, SPLIT_BLOCKS)
    if splits == 1:
        return
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, 512)[None, :]
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, 512], tl.float32)
    i = splits * 0
    while i < splits:
        at = partial + ((local.to(tl.int64) * partial_splits + i) * heads + h) * 516
        split_top = tl.load(at + 512)
        new_top = tl.maximum(top, split_top)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        keep = tl.exp2(top - shift)
        weight = tl.exp2(split_top - shift)
        total = total * keep + tl.load(at + 513) * weight
        acc = acc * keep[:, None] + tl.load(at[:, None] + column) * weight[:, None]
        top = new_top
        i += 1
    sinks = tl.load(sink + h, mask=h < heads * ((given >> 2) & 1), other=float("-inf"))
    factor, row_lse = normaliser(top, total, sinks)
    tl.store(lse + b * l_b + s * l_s + h * l_h, row_lse)
    out_row = b * o_b + s * o_s + h.to(tl.int64) * o_h
    if ALIGNED:
        out_row = tl.multiple_of(out_row, 8)
    tl.store((out + out_row)[:, None] + column, fp32_to_bf16(acc * factor[:, None]))
