# ruff: noqa: N803 - constexpr names are upper case, and Triton compiles a subset of Python
"""Log-probabilities whose bits depend on the row alone: not on other rows, padding, the batch or the device.

Decode at a temperature used to take log(softmax(z / T)) where prefill rescoring takes log_softmax; the two round
differently, and the former is -inf for a token far below the best. Here both are one kernel, every operation fixed::

    z    = x / T                        fp32, rounded to nearest; no division without a temperature
    m    = max(z),  d = z - m
    lane l of 1024:  s[l] = exp(d[l]) + exp(d[l + 1024]) + ...         in column order, from 0
    s    = s[:512] + s[512:], then s[:256] + s[256:], ..., one value
    out  = d - log(s)

exp and log are polynomials of plain fp32 multiplications and additions (Cephes' coefficients, good to an ulp): a
device's own exponential is an approximation of its own. Contraction into fused multiply-adds is switched off.

Tiling: one program a row, three passes over blocks of 1024 columns (maximum, sum, result); each lane sums its own
columns and the lanes are folded once, so the row's schedule is the same whatever runs beside it.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_triton.target import target_of

#: "1" (also when unset): decode takes ``log_softmax``; "0": log(softmax), not repeatable. Read at each call.
INVARIANT_LOGPROBS = "DSV4_INVARIANT_LOGPROBS"

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def exp_nonpositive(x):
    """exp of x <= 0: x = n ln 2 + r, a polynomial in r times 2**n; 0 where n is below -126. NaN stays NaN."""
    y = tl.maximum(tl.where(x == x, x, 0.0), -88.0)
    n = tl.floor(y * 1.44269504088896341 + 0.5)
    r = (y - n * 0.693359375) - n * -2.12194440e-4
    p = 1.9875691500e-4 * r + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    value = p * (r * r) + r + 1.0
    scale = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x == x, value * scale, x)


@triton.jit
def log_normal(x):
    """log of normal x > 0: x = 2**e (1 + f) with f in [-0.3, 0.42], a polynomial in f. NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    e = (bits >> 23) - 126
    m = ((bits & 0x7FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    low = m < 0.707106781186547524
    exponent = tl.where(low, e - 1, e).to(tl.float32)
    f = tl.where(low, m + m, m) - 1.0
    z = f * f
    p = 7.0376836292e-2 * f - 1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f - 1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f - 1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f - 2.4999993993e-1
    p = p * f + 3.3333331174e-1
    y = p * f * z + exponent * -2.12194440e-4 - 0.5 * z
    return tl.where(x == x, (f + y) + exponent * 0.693359375, x)


@triton.jit
def _scaled(logits, at, vocabulary, temperature, HAS_TEMPERATURE: tl.constexpr):
    z = tl.load(logits + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
    if HAS_TEMPERATURE:
        z = tl.div_rn(z, tl.zeros_like(z) + temperature)
    return z


@triton.jit(do_not_specialize=["vocabulary"])
def _log_softmax_kernel(
    logits, stride, temperatures, tokens, out, vocabulary,
    HAS_TEMPERATURE: tl.constexpr, ONE_TOKEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 1024)
    logits += row * stride
    temperature = tl.load(temperatures + row) if HAS_TEMPERATURE else 1.0

    peak = tl.full([1024], float("-inf"), tl.float32)
    start = 0
    while start < vocabulary:
        peak = tl.maximum(peak, _scaled(logits, start + lane, vocabulary, temperature, HAS_TEMPERATURE))
        start += 1024
    largest = tl.max(peak, axis=0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)

    total = tl.zeros([1024], tl.float32)
    start = 0
    while start < vocabulary:
        d = _scaled(logits, start + lane, vocabulary, temperature, HAS_TEMPERATURE) - largest
        total += exp_nonpositive(d)
        start += 1024
    # a sum over an axis of two is one addition: the order is written here, not chosen by a reduction
    for half in tl.static_range(9, -1, -1):
        total = tl.sum(tl.reshape(total, (2, 1 << half)), axis=0)
    log_total = log_normal(total)

    if ONE_TOKEN:
        token = tl.load(tokens + row).to(tl.int64)
        known = (token >= 0) & (token < vocabulary)
        z = _scaled(logits, tl.where(known, token, 0) + tl.arange(0, 1), vocabulary, temperature, HAS_TEMPERATURE)
        tl.store(out + row + tl.arange(0, 1), tl.where(known, (z - largest) - log_total, float("-inf")))
    else:
        start = 0
        while start < vocabulary:
            at = start + lane
            d = _scaled(logits, at, vocabulary, temperature, HAS_TEMPERATURE) - largest
            tl.store(out + row * vocabulary + at, d - log_total, mask=at < vocabulary)
            start += 1024


def log_softmax(logits: Tensor, temperature: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """fp32 ``[R, V]`` log-probabilities.

    Args:
        logits: ``[R, V]``, fp32, bf16 or fp16, contiguous columns. -inf stays -inf, a NaN or +inf makes its row NaN.
        temperature: fp32 ``[R]``, positive, or None for 1 without a division.
        out: contiguous fp32 ``[R, V]`` to write, for captured graphs.
    """
    out = _output(logits, temperature, out, tuple(logits.shape), "log_softmax")
    _launch(logits, temperature, None, out)
    return out


def token_logprobs(
    logits: Tensor, tokens: Tensor, temperature: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """fp32 ``[R]``: column ``tokens[r]`` (int64 ``[R]``) of ``log_softmax``, its bits; -inf for a foreign token."""
    out = _output(logits, temperature, out, (logits.shape[0],), "token_logprobs")
    if tokens.dtype != torch.int64 or tokens.shape != logits.shape[:1] or not tokens.is_contiguous():
        raise ValueError(f"dsv4_triton.token_logprobs: tokens is not contiguous int64 [{logits.shape[0]}]")
    _launch(logits, temperature, tokens, out)
    return out


def decode_logprobs(logits: Tensor, temperature: Tensor) -> Tensor:
    """Log-probabilities that a decode step returns, fp32 ``[R, V]``: ``log_softmax``, unless the switch says otherwise.

    ValueError if ``DSV4_INVARIANT_LOGPROBS`` is set to anything but 0 or 1: an empty string would read as off.
    """
    switch = os.environ.get(INVARIANT_LOGPROBS, "1")
    if switch not in ("0", "1"):
        raise ValueError(f"dsv4_triton: {INVARIANT_LOGPROBS} is {switch!r}; set it to 0 or 1, or leave it unset")
    if switch == "1":
        return log_softmax(logits, temperature)
    return torch.softmax(logits.to(torch.float32) / temperature[:, None], dim=1).log()


def _output(
    logits: Tensor, temperature: Tensor | None, out: Tensor | None, shape: tuple[int, ...], where: str
) -> Tensor:
    """``out`` after checking it and the inputs, or a new tensor."""
    if logits.dim() != 2 or logits.dtype not in _FLOATS or logits.shape[1] < 1 or logits.stride(1) != 1:
        raise ValueError(
            f"dsv4_triton.{where}: logits are {logits.dtype} {tuple(logits.shape)} with strides {logits.stride()}; "
            "expected fp32, bf16 or fp16 [R, V >= 1] with contiguous columns"
        )
    if temperature is not None and (
        temperature.dtype != torch.float32 or temperature.shape != logits.shape[:1] or not temperature.is_contiguous()
    ):
        raise ValueError(f"dsv4_triton.{where}: temperature is not contiguous float32 [{logits.shape[0]}]")
    target_of(logits.device)
    if out is None:
        return torch.empty(shape, dtype=torch.float32, device=logits.device)
    if out.dtype != torch.float32 or tuple(out.shape) != shape or not out.is_contiguous():
        raise ValueError(f"dsv4_triton.{where}: out is not contiguous float32 {list(shape)}")
    return out


def _launch(logits: Tensor, temperature: Tensor | None, tokens: Tensor | None, out: Tensor) -> None:
    if logits.shape[0]:
        _log_softmax_kernel[(logits.shape[0],)](
            logits, logits.stride(0), out if temperature is None else temperature, out if tokens is None else tokens,
            out, logits.shape[1], HAS_TEMPERATURE=temperature is not None, ONE_TOKEN=tokens is not None,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
