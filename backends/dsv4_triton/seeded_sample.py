# ruff: noqa: N803 - constexpr names are upper case, and Triton compiles a subset of Python
"""Seeded sampling without a generator: Gumbel-max over the vocabulary, one coin a column, in fp64.

    token = argmax(logprob + g),   g = -log(-log u),   u = fp64(hash) / (2**32 - 1)

Both ends of u are closed. u = 1 would give +inf, and NaN on a masked column, so log u is capped at -2**-32 (32 ln 2);
u = 0 has log u floored at the lowest fp64 (g = -709.78). All other hashes are untouched. Same formula as SGLang's
``multinomial_with_seed`` with its capped endpoint. fp64 logarithms are good to an ulp on each device, so CPU and GPU
agree in tokens, unless two columns come closer than that.

Tiling: one program a row walks the vocabulary in blocks of 1024, each lane keeping its own best; the winner's index is
the lowest among equals, so no order of reduction matters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_triton.coins import check_keys, murmur3, row_key, uniform
from dsv4_triton.target import target_of


@triton.jit
def gumbel(h):
    """fp64 Gumbel noise of uint32 hashes, finite everywhere."""
    u = tl.where(h == 0, 1.0, uniform(h))
    log_u = tl.where(h == 0, -1.7976931348623157e308, tl.minimum(tl.log(u), -2.3283064365386963e-10))
    return -tl.log(-log_u)


@triton.jit(do_not_specialize=["vocabulary"])
def _sample_kernel(logprobs, stride, seeds, positions, vocabulary, out, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    seed, position = row_key(seeds, positions, row)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float64)
    index = lane
    start = 0
    while start < vocabulary:
        at = start + lane
        value = tl.load(logprobs + row * stride + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        score = value.to(tl.float64) + gumbel(murmur3(seed, position, at.to(tl.uint32)))
        larger = score > best  # false for NaN, and for a tie, which leaves the lower index
        best = tl.where(larger, score, best)
        index = tl.where(larger, at, index)
        start += BLOCK
    largest = tl.max(best, axis=0)
    tl.store(out + row, tl.min(tl.where(best == largest, index, 0x7FFFFFFF), axis=0))


def seeded_sample(logprobs: Tensor, seeds: Tensor, positions: Tensor, out: Tensor | None = None) -> Tensor:
    """One token a row, int32 ``[bs]``.

    Args:
        logprobs: ``[bs, V]``, fp32, bf16 or fp16; -inf where masked. Offsets of a row do not matter: logits will do.
        seeds, positions: int64 ``[bs]``; the position is that of the token to be drawn.
        out: int32 ``[bs]`` to write, for captured graphs.

    A row without any finite value gives 0. ValueError for shapes that do not match, as of a batch still padded.
    """
    check_keys(seeds, positions, "seeded_sample")
    bs = logprobs.shape[0]
    if logprobs.dim() != 2 or logprobs.shape[1] < 1 or logprobs.stride(1) != 1 or seeds.shape[0] != bs:
        raise ValueError(
            f"dsv4_triton.seeded_sample: logprobs {tuple(logprobs.shape)} with strides {logprobs.stride()} for "
            f"{seeds.shape[0]} seeds; expected [bs, V >= 1] rows with contiguous columns, unpadded as the seeds are"
        )
    if out is None:
        out = torch.empty(bs, dtype=torch.int32, device=logprobs.device)
    elif out.dtype != torch.int32 or out.shape != (bs,) or not out.is_contiguous():
        raise ValueError(f"dsv4_triton.seeded_sample: out is not contiguous int32 [{bs}]")
    target_of(logprobs.device)
    if bs:
        _sample_kernel[(bs,)](
            logprobs, logprobs.stride(0), seeds, positions, logprobs.shape[1], out,
            BLOCK=1024, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def seeded_sample_sorted(logprobs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """As the top-k/top-p path draws: the column of a coin is the rank after a stable descending sort."""
    ordered, index = torch.sort(logprobs, dim=1, descending=True, stable=True)
    rank = seeded_sample(ordered, seeds, positions)
    return index.gather(1, rank[:, None].to(torch.int64))[:, 0].to(torch.int32)
