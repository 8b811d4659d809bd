"""Sparse attention twice: in fp64 as the truth, and as a good low-precision kernel would compute it.

For a row with keys k_i (each also its own value, rope part included), head query q and attention sink c
(FlashMLA ``tests/ref.py``, SGLang's DeepSeek-V4 backend; the sink is that of arXiv:2606.19348):

    s_i = scale * q . k_i        lse = log sum_i exp(s_i)
    out = sum_i exp(s_i) k_i / (sum_i exp(s_i) + exp(c))  =  softmax(s) k * sigmoid(lse - c)

The sink is a key with value zero and leaves lse alone; -inf means none and +inf gives zeros. A row without keys has
lse +inf and an output of exact zeros, with or without a sink.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_CHUNK_BYTES = 192 << 20  # gathered keys, scores and outputs of the rows that are computed together
_BLOCK = 64  # keys that the low-precision form takes at once


def attend(q: Tensor, bank: Tensor, index: Tensor, sink: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The truth: softmax attention in fp64.

    Args:
        q: bf16 ``[T, H, D]`` (or wider).
        bank: ``[M, D]`` keys, any floating dtype; keys that no row names may hold anything, NaN included.
        index: int64 ``[T, N]`` rows of ``bank``, negative where absent.
        sink: fp32 ``[H]`` or None.
        scale: multiplies every score.

    Returns:
        fp64 ``out [T, H, D]`` and ``lse [T, H]``, natural logarithm.
    """
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], torch.inf, dtype=torch.float64, device=q.device)
    for rows in _row_chunks(q, index, itemsize=8):
        present = index[rows] >= 0
        keys = _gather(bank, index[rows], torch.float64)
        scores = torch.bmm(q[rows].to(torch.float64), keys.mT).mul_(scale)
        scores.masked_fill_(~present[:, None, :], -torch.inf)
        nonempty = present.any(dim=1)
        peak = torch.where(nonempty[:, None], scores.amax(dim=-1), 0.0)
        weights = scores.sub_(peak[..., None]).exp_()
        total = weights.sum(dim=-1)
        log_total = torch.where(nonempty[:, None], peak + total.log(), torch.inf)
        share = torch.ones_like(total) if sink is None else torch.sigmoid(log_total - sink.to(torch.float64))
        out[rows] = torch.where(nonempty[:, None, None], torch.bmm(weights, keys) * (share / total)[..., None], 0.0)
        lse[rows] = log_total
    return out, lse


def attend_low_precision(
    q: Tensor, bank: Tensor, index: Tensor, sink: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The same in the precision of a good kernel, to learn how large an honest error is.

    bf16 queries, keys and probabilities, fp32 products and sums, an online softmax over blocks of 64 keys from the
    last to the first (a kernel goes the other way), bf16 output. Arguments as in ``attend``.

    Returns:
        bf16 ``out [T, H, D]`` and fp32 ``lse [T, H]``.
    """
    out = torch.zeros(q.shape, dtype=torch.bfloat16, device=q.device)
    lse = torch.full(q.shape[:2], torch.inf, dtype=torch.float32, device=q.device)
    for rows in _row_chunks(q, index, itemsize=4):
        query = q[rows].to(torch.bfloat16).to(torch.float32)
        peak = torch.full(query.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
        total = torch.zeros_like(peak)
        weighted = torch.zeros_like(query)
        for block in reversed(torch.split(index[rows], _BLOCK, dim=1)):
            present = block >= 0
            keys = _gather(bank, block, torch.bfloat16).to(torch.float32)
            scores = (torch.bmm(query, keys.mT) * scale).masked_fill(~present[:, None, :], -torch.inf)
            new_peak = torch.maximum(peak, scores.amax(dim=-1))
            shift = torch.where(new_peak == -torch.inf, 0.0, new_peak)
            decay = torch.exp(peak - shift)
            weights = torch.exp(scores - shift[..., None])
            total = total * decay + weights.sum(dim=-1)
            rounded = weights.to(torch.bfloat16).to(torch.float32)
            weighted = weighted * decay[..., None] + torch.bmm(rounded, keys)
            peak = new_peak
        nonempty = (index[rows] >= 0).any(dim=1)
        denominator = total if sink is None else total + torch.exp(sink.to(torch.float32) - peak)
        quotient = weighted / denominator[..., None]
        out[rows] = torch.where(nonempty[:, None, None], quotient, 0.0).to(torch.bfloat16)
        lse[rows] = torch.where(nonempty[:, None], peak + total.log(), torch.inf)
    return out, lse


def _gather(bank: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """``[t, N, D]`` keys, zero where absent, so that zero weights meet no stray NaN."""
    if bank.shape[0] == 0:
        return torch.zeros(*index.shape, bank.shape[1], dtype=dtype, device=bank.device)
    keys = bank.index_select(0, index.clamp(min=0).flatten()).to(dtype).view(*index.shape, bank.shape[1])
    return keys.masked_fill_((index < 0)[..., None], 0.0)


def _row_chunks(q: Tensor, index: Tensor, itemsize: int) -> Iterator[slice]:
    """Slices of rows whose intermediates stay near ``_CHUNK_BYTES``; none if there is nothing to attend."""
    _, heads, width = q.shape
    keys = index.shape[1]
    if keys == 0:
        return
    row_bytes = itemsize * (2 * keys * width + 2 * heads * keys + 2 * heads * width)
    step = max(1, _CHUNK_BYTES // row_bytes)
    for first in range(0, q.shape[0], step):
        yield slice(first, first + step)
