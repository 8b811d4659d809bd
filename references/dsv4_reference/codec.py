"""The FP8 + UE8M0 number format in plain arithmetic, so that no library cast and no kernel is its own judge.

Format (SGLang's DeepSeek-V4 pool, FlashMLA's ``tests/quant.py``): of 512 bf16 values, the first 448 are stored as
e4m3 in 7 groups of 64, each with a power-of-two scale; the last 64 (rope) are stored as they are. Per group

    amax  = max(max|x|, 1e-4)
    e     = ceil(log2(amax / 448))              scale byte e + 127
    code  = e4m3(x / 2^e)                       round to nearest, ties to even; |x / 2^e| <= 448 by choice of e
    value = e4m3^-1(code) * 2^e

A group that holds a NaN or an infinity has scale byte 255, which reads as NaN throughout: never silently finite.
Everything below is exact: bf16 times powers of two, integers of at most 16, and frexp instead of a rounded logarithm.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from dsv4_reference.geometry import GROUP, GROUPS, HEAD_DIM, NOPE

AMAX_FLOOR = 1e-4
SCALE_BIAS = 127
SCALE_NAN = 255
CODE_NAN = 0x7F
_ROWS_CPU = 256  # rows at a time, so that a CPU works in its caches
_ROWS = 1 << 16  # and a GPU needs little memory
_MIN_NORMAL_EXPONENT = -6  # e4m3: exponent bias 7, three mantissa bits, no infinity
_MANTISSA = 8


def quantise(k: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of the nope part.

    Args:
        k: bf16 (or wider) ``[N, 512]``.

    Returns:
        uint8 ``[N, 448]`` e4m3 codes and uint8 ``[N, 7]`` scale bytes. In a group that is not finite the scale is 255
        and the codes are NaN codes; only the scale is settled by the format.
    """
    if k.dim() != 2 or k.shape[1] != HEAD_DIM:
        raise ValueError(f"dsv4_reference.quantise: k must be [N, {HEAD_DIM}], got shape {tuple(k.shape)}")
    # fp32 holds every bf16 value, and scaling by a power of two is exact there unless the result is far below the
    # least e4m3 value and rounds to zero either way.
    x = k[:, :NOPE].to(torch.float32).reshape(-1, GROUPS, GROUP)
    finite = x.isfinite().all(dim=-1, keepdim=True)
    x = torch.where(finite, x, 0.0)
    exponent = _scale_exponent(x.abs().amax(dim=-1, keepdim=True).clamp(min=AMAX_FLOOR))
    codes = torch.where(finite, encode_e4m3(x * _power_of_two(-exponent)), CODE_NAN)
    scales = torch.where(finite, exponent + SCALE_BIAS, SCALE_NAN)
    return codes.to(torch.uint8).reshape(-1, NOPE), scales.to(torch.uint8).reshape(-1, GROUPS)


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """fp64 ``[N, 448]`` of any bytes: codes uint8 ``[N, 448]``, scales uint8 ``[N, 7]``.

    Scale byte b means 2^(b - 127) for 0 to 254 and NaN for 255; codes 0x7F and 0xFF are NaN. Values are exact: a
    kernel that reads into bf16 rounds what lies outside its normal range, which no stored row with scale 105 to 247
    (all that ``quantise`` writes) does.
    """
    half = _power_of_two((scales.to(torch.int32) - SCALE_BIAS) // 2).to(torch.float64)  # 2^-127 is no normal fp32
    rest = _power_of_two((scales.to(torch.int32) - SCALE_BIAS + 1) // 2).to(torch.float64)
    scale = torch.where(scales == SCALE_NAN, torch.nan, half * rest)
    values = _e4m3_table(codes.device).index_select(0, codes.to(torch.int32).flatten()).reshape(-1, GROUPS, GROUP)
    return (values * scale[..., None]).reshape(-1, NOPE)


def quantise_dequantise(k: Tensor) -> Tensor:
    """bf16 ``[N, 512]`` through the format and back: fp64 ``[N, 512]``, the values that a kernel reads; rope exact."""
    values = torch.empty(k.shape, dtype=torch.float64, device=k.device)
    step = _ROWS_CPU if k.is_cpu else _ROWS
    for first in range(0, k.shape[0], step):
        values[first : first + step, :NOPE] = dequantise(*quantise(k[first : first + step]))
    values[:, NOPE:] = k[:, NOPE:]
    return values


def encode_e4m3(x: Tensor) -> Tensor:
    """e4m3 codes, int32 of any shape, of fp32 or fp64 values: nearest, ties to even, saturating at 448; NaN is 0x7F."""
    magnitude = x.abs().clamp(max=448.0)
    # frexp gives m * 2^e with m in [0.5, 1), so the leading bit has weight 2^(e - 1); of zero it gives e = 0.
    exponent = (torch.frexp(magnitude).exponent - 1).clamp(min=_MIN_NORMAL_EXPONENT)
    exponent = torch.where(magnitude == 0, _MIN_NORMAL_EXPONENT, exponent)
    eighths = (magnitude * _power_of_two(3 - exponent)).round().nan_to_num().to(torch.int32)
    # 8 .. 15 eighths are a normal number, fewer a subnormal one, and 16 carry into the next exponent: one formula.
    code = (exponent - _MIN_NORMAL_EXPONENT) * _MANTISSA + eighths
    return torch.where(x.isnan(), CODE_NAN, code + 128 * torch.signbit(x))


def decode_e4m3(code: int) -> float:
    """The value of one e4m3 byte, 0 to 255; NaN for 0x7F and 0xFF."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    magnitude = (mantissa if exponent == 0 else mantissa + _MANTISSA) * 2.0 ** (max(exponent, 1) - 10)
    return -magnitude if code & 128 else magnitude


def _scale_exponent(amax: Tensor) -> Tensor:
    """ceil(log2(amax / 448)), exactly: 448 = 0.875 * 2^9, and amax = m * 2^e with m in [0.5, 1)."""
    mantissa, exponent = torch.frexp(amax)
    return exponent - 9 + (mantissa > 0.875)


def _power_of_two(exponent: Tensor) -> Tensor:
    """fp32 2^exponent for int32 exponents -126 to 127, by its bits: exact on every device, which exp2 need not be."""
    return (exponent + 127 << 23).view(torch.float32)


@cache
def _e4m3_table(device: torch.device) -> Tensor:
    return torch.tensor([decode_e4m3(code) for code in range(256)], dtype=torch.float64, device=device)
