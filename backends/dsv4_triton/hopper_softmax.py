"""The softmax of the Hopper kernels: weights by blocks of keys, joined by powers of two.

A weight is ``exp2(score - m)`` in bf16, where m is its block's maximum rounded up to an integer. Blocks are joined
under the maximum so far, an integer as well: that takes products with powers of two, which are exact. So a row has the
same bits whether its blocks are weighed one after the other by one program, or by many at once.

The sum that divides the output is of weights as rounded, so that a row with one key gives exactly that key. The sum in
the lse is of weights as they were.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4_triton.hopper_layouts import SCORES


@gluon.jit
def _rounded(x):
    """fp32 rounded to bf16, and the same as fp32."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $4, $3; shl.b32 $1, $0, 16; and.b32 $2, $0, 0xffff0000;", "=&r,=&f,=&f,f,f", [x],
        dtype=(gl.bfloat16, gl.float32), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def weigh(s, scale):
    """Scores [64 heads, 64 keys] -> bf16 weights, their integer maxima (-inf without keys), weights as fp32, rounded
    and not. ``scale`` is positive, and includes log2(e).
    """
    top = gl.ceil(gl.max(s, 1) * scale)
    shift = gl.expand_dims(gl.where(top == float("-inf"), 0.0, top), 1)
    p = gl.exp2(gl.fma(s, gl.full([64, 64], 1.0, gl.float32, SCORES) * scale, -shift))
    rounded, value = _rounded(p)
    return rounded, top, value, p


@gluon.jit
def power(x):
    """2**x of integers up to 0, as fp32; 0 below the normal range."""
    return ((gl.maximum(x, -127.0).to(gl.int32) + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def joined(top, block_top):
    """The maximum with one more block, the factor of what was before and of that block."""
    new_top = gl.maximum(top, block_top)
    shift = gl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, power(top - shift), power(block_top - shift)


@gluon.jit
def scaled(weights, factor):
    """bf16 weights [heads, keys] times a power of two for each head."""
    factor, weights = gl.broadcast(gl.expand_dims(factor.to(gl.bfloat16), 1), weights)
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [weights, factor], dtype=gl.bfloat16, is_pure=True, pack=2
    )
