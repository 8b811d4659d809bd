# ruff: noqa: N803 - constexpr names are upper case, and Gluon compiles a subset of Python
"""What the kernels for few rows leave of 64 heads' sums: outputs and lse, or a split's share in the workspace."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4_triton.hopper.layouts import PARTIAL_WORDS
from dsv4_triton.hopper.softmax import finish


@gluon.jit
def emit(acc, top, total, output, half, slice_, LAYOUT: gl.constexpr, SPLIT: gl.constexpr):
    """Columns from ``slice_`` times their number on of 64 heads; with the first ones their lse, or maximum and total.

    A split of a row that has others leaves bare sums, as ``workload`` lays them out; one that the row does not need,
    nothing.
    """
    out, o_h, lse, l_h, sink, given, partial, item, heads, split, splits = output
    columns: gl.constexpr = acc.shape[1]
    rows: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    h = gl.arange(0, 64, rows) + half * 64
    column = gl.expand_dims(gl.arange(0, columns, gl.SliceLayout(0, LAYOUT)), 0) + slice_ * columns
    sinks = gl.load(sink + h, mask=(h >= 0) & ((given & 4) != 0), other=float("-inf"))
    factor, row_lse = finish(top, total, sinks)
    places = out + (gl.expand_dims(h.to(gl.int64) * (o_h * 8), 1) + column)
    y = (acc * gl.expand_dims(factor, 1)).to(gl.bfloat16)
    if SPLIT:
        one_of = (splits > 1) & (split < splits)
        alone = (splits == 1) & (split == 0)
        at = (item.to(gl.int64) * heads + h) * PARTIAL_WORDS
        gl.store(partial + (gl.expand_dims(at, 1) + column), acc, mask=one_of)
        gl.store(places, y, mask=alone)
        if slice_ == 0:
            gl.store(partial + (at + 512), top, mask=(h >= 0) & one_of)
            gl.store(partial + (at + 513), total, mask=(h >= 0) & one_of)
            gl.store(lse + h.to(gl.int64) * l_h, row_lse, mask=(h >= 0) & alone)
    else:
        gl.store(places, y)
        if slice_ == 0:
            gl.store(lse + h.to(gl.int64) * l_h, row_lse)
