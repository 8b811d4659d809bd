# ruff: noqa: N803, SIM108 - constexpr names are upper case, and Triton compiles a subset of Python
"""Tiles of query and key rows as a matrix product takes them: fetched, decoded, and cut into column parts.

512 columns are worked on in parts of 3 * 128 + 64 + 64, the last being the rope: wider parts spill registers (256 costs
100 bytes a thread on sm_90), narrower ones starve the matrix instruction. Interpreted, an operation costs the same for
64 columns as for 512, so there all columns are one part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4_triton.numerics import (
    INTERPRETED,
    bf16_to_fp32,
    decode_e4m3,
    decode_packed,
    decode_scale,
    device_function,
    packed_scale,
)


@triton.constexpr_function
def part_width(parts, j):
    """Columns of part ``j`` when the 512 columns are worked on in ``parts`` parts."""
    return 512 if parts == 1 else (128, 128, 128, 64, 64)[j]


@triton.constexpr_function
def part_start(parts, j):
    """First column of part ``j``."""
    return 0 if parts == 1 else (0, 128, 256, 384, 448)[j]


@device_function
def operand(x):
    """A tile as the matrix product takes it: bf16, or fp32 where the interpreter cannot compute in bf16."""
    if INTERPRETED:
        y = x.to(tl.float32)
    else:
        y = x.to(tl.bfloat16)
    return y


@device_function
def _load_bf16(pointers, mask):
    """bf16 tile as an operand, zero where masked."""
    if INTERPRETED:
        y = bf16_to_fp32(tl.load(pointers.to(tl.pointer_type(tl.int16)), mask=mask, other=0))
    else:
        y = tl.load(pointers, mask=mask, other=0.0)
    return y


@device_function
def load_parts(rows, mask, PARTS: tl.constexpr):
    """512 bf16 columns of rows (pointers ``[N, 1]``) as a tuple of operands, one a part."""
    if PARTS == 1:
        parts = (_load_bf16(rows + tl.arange(0, 512)[None, :], mask),)
    else:
        parts = (
            _load_bf16(rows + tl.arange(0, 128)[None, :], mask),
            _load_bf16(rows + 128 + tl.arange(0, 128)[None, :], mask),
            _load_bf16(rows + 256 + tl.arange(0, 128)[None, :], mask),
            _load_bf16(rows + 384 + tl.arange(0, 64)[None, :], mask),
            _load_bf16(rows + 448 + tl.arange(0, 64)[None, :], mask),
        )
    return parts


@device_function
def _load_nope(rows, scales, valid, OFF: tl.constexpr, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, ASM: tl.constexpr):
    """Columns OFF .. OFF + 64 * GROUPS of packed rows, decoded: ``[BLOCK_N, 64 * GROUPS]``.

    ``scales``: a row's eight scale bytes as one int64. Bytes travel four to an int32 lane, 16 lanes a group.
    """
    group = tl.arange(0, GROUPS)
    lane = tl.arange(0, 16)
    column = (group[:, None] * 16 + lane[None, :] + OFF // 4)[None, :, :]
    pointers = rows.to(tl.pointer_type(tl.int32))[:, None, None] + column
    lanes = tl.load(pointers, mask=valid[:, None, None], other=0)
    byte = ((scales[:, None] >> ((group + OFF // 64) * 8).to(tl.int64)[None, :]) & 255).to(tl.int32)
    if ASM:
        first, second = packed_scale(byte)
        b0, b1, b2, b3 = decode_packed(lanes, first[:, :, None], second[:, :, None])
    else:
        factor = decode_scale(byte)[:, :, None]
        b0 = operand(decode_e4m3(lanes & 255) * factor)
        b1 = operand(decode_e4m3((lanes >> 8) & 255) * factor)
        b2 = operand(decode_e4m3((lanes >> 16) & 255) * factor)
        b3 = operand(decode_e4m3((lanes >> 24) & 255) * factor)
    return tl.reshape(tl.join(tl.join(b0, b2), tl.join(b1, b3)), [BLOCK_N, GROUPS * 64])


@device_function
def load_packed(rows, scales, valid, BLOCK_N: tl.constexpr, ASM: tl.constexpr, PARTS: tl.constexpr):
    """Packed rows (byte pointers of data and of scales, ``[BLOCK_N]``) as a tuple of operands, one a part."""
    if PARTS == 1:
        column = tl.arange(0, 512)[None, :]
        nope = valid[:, None] & (column < 448)
        code = tl.load(rows[:, None] + column, mask=nope, other=0)
        factor = decode_scale(tl.load(scales[:, None] + tl.arange(0, 8)[None, :], mask=valid[:, None], other=0))
        factor = tl.reshape(tl.broadcast_to(factor[:, :, None], [BLOCK_N, 8, 64]), [BLOCK_N, 512])
        rope = (rows[:, None] + (2 * column - 448)).to(tl.pointer_type(tl.int16))
        rope = bf16_to_fp32(tl.load(rope, mask=valid[:, None] & (column >= 448), other=0))
        parts = (operand(tl.where(column < 448, decode_e4m3(code) * factor, rope)),)
    else:
        bytes8 = tl.load(scales.to(tl.pointer_type(tl.int64)), mask=valid, other=0)
        parts = (
            _load_nope(rows, bytes8, valid, 0, 2, BLOCK_N, ASM),
            _load_nope(rows, bytes8, valid, 128, 2, BLOCK_N, ASM),
            _load_nope(rows, bytes8, valid, 256, 2, BLOCK_N, ASM),
            _load_nope(rows, bytes8, valid, 384, 1, BLOCK_N, ASM),
            _load_bf16(
                (rows + 448).to(tl.pointer_type(tl.bfloat16))[:, None] + tl.arange(0, 64)[None, :], valid[:, None]
            ),
        )
    return parts
