"""Log-probabilities twice: in fp64 as the truth, and in fp32 with every operation and its order fixed, to the bit.

Prefill and decode agree bit for bit only if both take log_softmax in one order; log(softmax) rounds differently, and is
-inf where log_softmax is finite. The fixed form, for a row of V columns::

    z    = x / T                        fp32, rounded to nearest; no division without a temperature
    m    = max(z),  d = z - m
    lane l of 1024:  s[l] = exp(d[l]) + exp(d[l + 1024]) + ...         in column order, from 0
    s    = s[:512] + s[512:], then s[:256] + s[256:], ..., one value
    out  = d - log(s)

Columns beyond V add zeros, so a row depends neither on padding nor on other rows. exp and log are polynomials in fp32
multiplications and additions (Cephes' coefficients, good to an ulp), not fused, so that devices have the same bits.
A masked column (-inf) stays -inf; so does a row that is masked throughout. A row with NaN or +inf is NaN.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

LANES = 1024
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # their sum is ln 2; n * high is exact
_LOG2E = np.float32(1.44269504088896341)
_SQRT_HALF = np.float32(0.707106781186547524)


def log_softmax(logits: NDArray[np.floating], temperature: NDArray[np.floating] | None = None) -> NDArray[np.float64]:
    """The truth: fp64 ``[R, V]`` of logits ``[R, V]`` over temperature ``[R]``."""
    z = logits.astype(np.float64)
    if temperature is not None:
        z = z / temperature.astype(np.float64)[:, None]
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, as it should be
        d = z - _peak(z)
    total = np.exp(d).sum(axis=1, keepdims=True)
    return d - np.log(np.where(total == 0, 1.0, total))


def log_softmax_bits(logits: Floats, temperature: Floats | None = None) -> Floats:
    """The fixed form: fp32 ``[R, V]`` of fp32 logits ``[R, V]`` over fp32 temperature ``[R]``, positive."""
    z = logits if temperature is None else logits / temperature[:, None]
    rows, columns = z.shape
    with np.errstate(invalid="ignore"):
        d = z - _peak(z)
    padded = np.full((rows, -(-columns // LANES) * LANES), -np.inf, dtype=np.float32)
    padded[:, :columns] = d
    total = np.zeros((rows, LANES), dtype=np.float32)
    for block in np.split(padded, padded.shape[1] // LANES, axis=1):
        total = total + exp_bits(block)
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return d - log_bits(total)


def exp_bits(x: Floats) -> Floats:
    """exp of x <= 0: x = n ln 2 + r, a polynomial in r times 2**n; 0 where n is below -126. NaN stays NaN."""
    y = np.where(np.isnan(x), np.float32(0), np.maximum(x, np.float32(-88)))
    n = np.floor(y * _LOG2E + np.float32(0.5))
    r = (y - n * _LN2_HIGH) - n * _LN2_LOW
    value = _horner(_EXP, r) * (r * r) + r + np.float32(1)
    scale = (n.astype(np.int32) + 127 << 23).view(np.float32)
    return np.where(np.isnan(x), x, value * scale)


def log_bits(x: Floats) -> Floats:
    """log of normal x > 0: x = 2**e (1 + f) with f in [-0.3, 0.42], a polynomial in f. NaN stays NaN."""
    bits = x.view(np.int32)
    e = (bits >> 23) - 126
    m = (bits & 0x7FFFFF | 0x3F000000).view(np.float32)
    low = m < _SQRT_HALF
    exponent = (e - low).astype(np.float32)
    f = np.where(low, m + m, m) - np.float32(1)
    z = f * f
    y = _horner(_LOG, f) * f * z + exponent * _LN2_LOW - np.float32(0.5) * z
    return np.where(np.isnan(x), x, (f + y) + exponent * _LN2_HIGH)


def _peak(z: NDArray[np.floating]) -> NDArray[np.floating]:
    """``[R, 1]`` row maxima, NaN left out; 0 for a row that is masked throughout."""
    peak = np.fmax.reduce(z, axis=1, keepdims=True)
    return np.where(peak == -np.inf, np.zeros_like(peak), peak)


def _horner(coefficients: tuple[float, ...], x: Floats) -> Floats:
    value = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + np.float32(coefficient)
    return value
