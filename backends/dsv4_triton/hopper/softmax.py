"""The online softmax of the Hopper kernels, in base 2: blocks of keys one after the other, whoever makes them.

Many rows: one role has the scores of a row's blocks in turn. Few rows: they come from memory, every second block to one
of two roles, with their maxima. Both call the same functions on the same layout, so that their bits are the same.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4_triton.hopper.layouts import SCORES
from dsv4_triton.numerics import LN2, LOG2E


@gluon.jit
def block_maximum(s, scale):
    """Of scores [64 heads, keys]: in base 2, as ``scale`` is positive and includes log2(e); -inf without keys."""
    return gl.max(s, 1) * scale


@gluon.jit
def weigh(s, scale, top, block_top):
    """Weights of a block under the maximum so far, the factor of what came before, the new maximum.

    Scores [64 heads, 64 keys] are scaled on their way into the exponent.
    """
    new_top = gl.maximum(top, block_top)
    shift = gl.where(new_top == float("-inf"), 0.0, new_top)
    factor = gl.full([64, 64], 1.0, gl.float32, SCORES) * scale
    return gl.exp2(gl.fma(s, factor, -gl.expand_dims(shift, 1))), gl.exp2(top - shift), new_top


@gluon.jit
def finish(top, total, sinks):
    """Factor of the sums, and the natural-log lse: 0 and +inf without keys.

    ``total == 0`` tells an empty row and is false for NaN: a poisoned row must not come out as zeros.
    """
    vacant = total == 0.0
    filled = gl.where(vacant, 1.0, total)
    weight = gl.exp2(sinks * LOG2E - gl.where(vacant, 0.0, top))
    lse = gl.where(vacant, float("inf"), (top + gl.log2(filled)) * LN2)
    return gl.where(vacant, 0.0, 1.0 / (filled + weight)), lse
