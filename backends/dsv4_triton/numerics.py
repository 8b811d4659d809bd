# ruff: noqa: N803 - constexpr names are upper case, and Triton compiles a subset of Python
"""Number formats inside kernels: e4m3, power-of-two scale bytes and bf16, exact and equal on a GPU and interpreted.

Triton's interpreter keeps bf16 as raw uint16, truncates fp32 -> bf16, mis-rounds fp32 -> e4m3 and reads the e4m3 NaN
bytes as 480; float8 pointers do not compile for sm_80. So formats are handled as integers here, and only proven
shortcuts (the bf16 cast, the packed decode in assembly) replace them on a GPU.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

#: True while kernels run through Triton's interpreter; fixed at import, as ``triton.jit`` itself decides then
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

#: Decorates what kernels call. Interpreted, a call of a jitted function patches all of triton.language anew, about a
#: millisecond of some ten that a step of attention takes; there a plain function does the same.
device_function = (lambda fn: fn) if INTERPRETED else triton.jit

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@device_function
def bf16_to_fp32(bits):
    """bf16 given as 16-bit integers -> fp32, exact."""
    return ((bits.to(tl.int32) & 0xFFFF) << 16).to(tl.float32, bitcast=True)


@device_function
def fp32_to_bf16(x):
    """fp32 -> bf16, round to nearest even; NaN stays NaN."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded)
        y = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(tl.bfloat16)
    return y


@device_function
def decode_e4m3(byte):
    """e4m3 bytes (any integer type, 0..255) -> fp32, exact: subnormals, both zeros and NaN (0x7F, 0xFF) included.

    The subnormals are m * 2**-9, written out instead of multiplied up from fp32 subnormals, which a target may flush.
    """
    b = byte.to(tl.int32)
    low = b & 0x7F
    normal = ((low << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    magnitude = tl.where(low < 8, low.to(tl.float32) * 0.001953125, normal)
    magnitude = tl.where(low == 0x7F, float("nan"), magnitude)
    return tl.where(b >= 0x80, -magnitude, magnitude)


@device_function
def decode_scale(byte):
    """Scale bytes 0..255 -> fp32 factor 2**(byte - 127): byte 0 is the subnormal 2**-127, byte 255 is NaN."""
    b = byte.to(tl.int32)
    bits = tl.where(b == 0, 0x00400000, tl.where(b == 255, 0x7FC00000, b << 23))
    return bits.to(tl.float32, bitcast=True)


@device_function
def scale_byte(amax_bits):
    """fp32 bits (int32, sign clear) of a group's finite amax -> scale byte 127 + ceil(log2(max(amax, 1e-4) / 448)).

    Exact: 448 = 1.75 * 2**8, so the exponent is that of amax minus 8, plus one if amax's significand exceeds 1.75. The
    floor of 1e-4 = 1.6384 * 2**-14 stands for exponent -22 and any smaller amax has no larger one: a max of bytes.
    """
    carry = ((amax_bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.maximum((amax_bits >> 23) - 8 + carry, 105)


@device_function
def inverse_scale(byte):
    """Scale bytes 105..247 -> fp32 2**(127 - byte), exact."""
    return ((254 - byte) << 23).to(tl.float32, bitcast=True)


@device_function
def encode_e4m3(x):
    """Finite fp32 -> e4m3 bytes (int32), round to nearest even, saturating at 448, in integers."""
    bits = x.to(tl.int32, bitcast=True)
    low = bits & 0x7FFFFFFF
    # keep 3 of 23 mantissa bits, move the exponent bias from 127 to 7; a carry runs into the exponent as it should
    normal = ((low + 0x7FFFF + ((low >> 20) & 1)) >> 20) - (120 << 3)
    # 2**14 has an fp32 ulp of 2**-9, the spacing of e4m3 subnormals: the addition rounds to nearest even
    subnormal = (low.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    magnitude = tl.minimum(tl.where(low < 0x3C800000, subnormal, normal), 0x7E)
    return magnitude | ((bits >> 24) & 0x80)


@device_function
def encode_scaled(bits, factor, HARDWARE: tl.constexpr):
    """bf16 as 16-bit integers, times an fp32 factor of a shape that broadcasts -> e4m3 bytes (uint8).

    A NaN factor makes 0x7F of everything; no other product is NaN or infinite. In assembly (``HARDWARE``: sm_89 and
    later) four values stay in two registers until they are four bytes of one: Triton's own conversion takes values and
    codes apart one by one, which is half of all instructions of a store. PTX makes every NaN product the canonical,
    positive one.
    """
    if HARDWARE:
        factors, _ = tl.broadcast(factor, bits.to(tl.float32))
        code = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            .reg .b16 low, high;
            shl.b32 a, $1, 16;
            and.b32 b, $1, 0xffff0000;
            shl.b32 c, $2, 16;
            and.b32 d, $2, 0xffff0000;
            mul.rn.f32 a, a, $3;
            mul.rn.f32 b, b, $4;
            mul.rn.f32 c, c, $5;
            mul.rn.f32 d, d, $6;
            cvt.rn.satfinite.e4m3x2.f32 low, b, a;
            cvt.rn.satfinite.e4m3x2.f32 high, d, c;
            mov.b32 $0, {low, high};
            }""",
            "=r,r,r,r,r,r,r",
            [bits, factors],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        value = bf16_to_fp32(bits) * factor
        code = tl.where(value != value, 0x7F, encode_e4m3(value)).to(tl.uint8)
    return code


@device_function
def packed_scale(byte):
    """Scale bytes -> two int32 of bf16x2 whose product is 2**(byte - 7), for ``decode_packed``.

    e4m3 bits placed into bf16 read 2**120 too small, and 2**(byte - 127 + 120) exceeds bf16 above byte 134: the rest
    goes into the second factor. Byte 255 makes the first one NaN.
    """
    first = tl.where(byte == 255, 0x7FC0, (tl.minimum(byte, 134) + 120) << 7)
    second = (tl.maximum(byte, 134) - 7) << 7
    return first | (first << 16), second | (second << 16)


def _decode_text(word: str, factors: tuple[str, str], *finish: str) -> str:
    """PTX of ``decode_packed``, up to the second factor: four e4m3 bytes of a word into bf16 pairs t and u."""
    lines = [
        ".reg .b32 a, b, t, u, n, c, d",
        f"prmt.b32 a, {word}, 0, 0x1404",
        f"prmt.b32 b, {word}, 0, 0x3424",
        "shr.b32 t, a, 4",
        "shr.b32 u, b, 4",
        "and.b32 a, a, 0x80008000",
        "and.b32 b, b, 0x80008000",
        "lop3.b32 t, t, 0x07f007f0, a, 0xEA",
        "lop3.b32 u, u, 0x07f007f0, b, 0xEA",
        f"and.b32 n, {word}, 0x7f7f7f7f",
        "add.u32 n, n, 0x01010101",
        "prmt.b32 c, n, 0, 0x9988",
        "prmt.b32 d, n, 0, 0xBBAA",
        f"fma.rn.bf16x2 t, t, {factors[0]}, c",
        f"fma.rn.bf16x2 u, u, {factors[1]}, d",
        "mov.b32 n, 0x80008000",
    ]
    return "{ " + "; ".join((*lines, *finish)) + "; }"


#: into four tensors of the lanes' shape, one scale a lane
DECODE_LANES = tl.constexpr(
    _decode_text(
        "$4", ("$5", "$5"), "fma.rn.bf16x2 t, t, $6, n", "fma.rn.bf16x2 u, u, $6, n", "mov.b32 {$0, $1}, t",
        "mov.b32 {$2, $3}, u",
    )
)  # fmt: skip
#: into four neighbours of one tensor, each with a scale of its own
DECODE_NEIGHBOURS = tl.constexpr(
    _decode_text("$2", ("$3", "$4"), "fma.rn.bf16x2 $0, t, $5, n", "fma.rn.bf16x2 $1, u, $6, n")
)


@device_function
def decode_packed(lanes, first, second):
    """Four e4m3 bytes an int32 lane, times the scale -> four bf16 tensors of the lanes' shape (byte 0 .. byte 3).

    ``s eeee mmm`` becomes ``s 0000eeee mmm0000``: the bf16 value times 2**-120, subnormals included; two packed
    multiplies by ``packed_scale`` finish. (byte & 0x7F) + 1 has its top bit set for NaN only; ``prmt`` spreads that
    bit over the half word, and all ones is a bf16 NaN, added by the first multiply. fma serves sm_80, mul does not.
    """
    return tl.inline_asm_elementwise(
        DECODE_LANES,
        "=h,=h,=h,=h,r,r,r",
        [lanes, first, second],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@device_function
def decode_scaled(code, byte, ASM: tl.constexpr):
    """e4m3 bytes (uint8) times the factors of scale bytes (int32, a shape that broadcasts) -> bf16, rounded once.

    Code 0x80 becomes +0, by either path. In assembly (``ASM``: sm_80 and later), ``decode_packed`` on four neighbours a
    register, each with a factor of its own.
    """
    if ASM:
        first = tl.where(byte == 255, 0x7FC0, (tl.minimum(byte, 134) + 120) << 7).to(tl.int16)
        second = ((tl.maximum(byte, 134) - 7) << 7).to(tl.int16)
        value = tl.inline_asm_elementwise(
            DECODE_NEIGHBOURS,
            "=r,=r,r,r,r,r,r",
            [code, first, second],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        value = fp32_to_bf16(decode_e4m3(code) * decode_scale(byte))
    return value
