# ruff: noqa: N803, RUF059 - constexpr names are upper case, and Gluon compiles a subset of Python
"""Items of the Hopper kernel: which row, heads and split an item is, and which blocks of keys are its own."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4_triton.hopper.layouts import BLOCK


@gluon.jit
def item_lengths(rows, item, SPLIT: gl.constexpr, HEAD_BLOCKS: gl.constexpr):
    """Clamped lengths of both lists of an item's row."""
    lengths, extra_lengths, width, extra_width, given, seq, first_row, splits = rows
    local = item // HEAD_BLOCKS
    if SPLIT:
        local = local // splits
    return row_lengths((lengths, extra_lengths, width, extra_width, given), (local + first_row) // seq)


@gluon.jit
def row_lengths(lists, b):
    """Clamped lengths of both lists of a request's rows."""
    lengths, extra_lengths, width, extra_width, given = lists
    n = gl.load(lengths + b, mask=(given & 1) != 0, other=width)
    extra = gl.load(extra_lengths + b, mask=(given & 2) != 0, other=extra_width)
    return gl.minimum(gl.maximum(n, 0), width), gl.minimum(gl.maximum(extra, 0), extra_width)


@gluon.jit
def row_of(item, seq, splits, lists, indices, SPLIT: gl.constexpr, SPLIT_BLOCKS: gl.constexpr):
    """An item of the kernels for few rows, (row, split): its request, row of the request, split and row's splits.

    Then what its blocks are: lengths of both lists, how many blocks, the first of them, both lists.
    """
    index, extra_index, i_b, i_s, e_b, e_s = indices
    row = item
    split = item * 0
    if SPLIT:
        row = item // splits
        split = item % splits
    b, s = row // seq, row % seq
    n, extra = row_lengths(lists, b)
    blocks = (n + BLOCK - 1) // BLOCK + (extra + BLOCK - 1) // BLOCK
    first = split * 0
    row_splits = first + 1
    if SPLIT:
        row_splits = gl.maximum((blocks + SPLIT_BLOCKS - 1) // SPLIT_BLOCKS, 1)
        first = split * SPLIT_BLOCKS
        blocks = gl.maximum(gl.minimum(blocks - first, SPLIT_BLOCKS), 0)
    held = (n, extra, blocks, first, index + offset_of(b, i_b, s, i_s), extra_index + offset_of(b, e_b, s, e_s))
    return b, s, split, row_splits, held


@gluon.jit
def item_place(rows, item, SPLIT: gl.constexpr, HEAD_BLOCKS: gl.constexpr):
    """Where an item is: row in this launch, request, row of the request, block of heads, split."""
    lengths, extra_lengths, width, extra_width, given, seq, first_row, splits = rows
    head_block = item % HEAD_BLOCKS
    local = item // HEAD_BLOCKS
    split = item * 0
    if SPLIT:
        split = local % splits
        local = local // splits
    row = local + first_row
    return local, row // seq, row % seq, head_block, split


@gluon.jit
def offset_of(i, i_stride, j, j_stride):
    return i.to(gl.int64) * i_stride + j.to(gl.int64) * j_stride


@gluon.jit
def item_span(n, extra, split, SPLIT: gl.constexpr, SPLIT_BLOCKS: gl.constexpr):
    """First block of an item, how many it has, and the row's splits; as ``attention_kernel.row_blocks`` cuts them.

    A row without keys has one block of nothing. A split that the row does not need has no blocks.
    """
    blocks = (n + BLOCK - 1) // BLOCK + (extra + BLOCK - 1) // BLOCK
    first = split * 0
    splits = first + 1
    count = gl.maximum(blocks, 1)
    if SPLIT:
        splits = gl.maximum((blocks + SPLIT_BLOCKS - 1) // SPLIT_BLOCKS, 1)
        first = split * SPLIT_BLOCKS
        count = gl.where(split < splits, gl.maximum(gl.minimum(blocks - first, SPLIT_BLOCKS), 1), 0)
    return first, count, splits


@gluon.jit
def unknown(x):
    """x, not known to be the same in each turn of a loop: what follows from it is not kept in registers across it."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)
