# ruff: noqa: N803 - constexpr names are upper case, and Triton compiles a subset of Python
"""Seeded coins of a verify step, written into static buffers: MurmurHash3 of (seed, length, column) as a uniform.

Column contract, for D draft slots a request with the root: columns 0 .. D - 1 are the rejection coins, column D is the
final coin; the length is the request's committed length before this verify, not a padded batch's positions. Nothing
depends on the batch size or the row. Formats (SGLang ``murmur_hash``, ``eagle_utils``)::

    hash: MurmurHash3_x86_32, hash seed 0, 16 little-endian bytes <u64 seed><u32 position><u32 column>
    coin: min(fp32(fp64(hash) / (2**32 - 1)), 1 - 2**-24)

The division must be in fp64 and the clamp must follow: 129 hashes round to 1.0. A multiply by the reciprocal gives the
same fp32 coin for all 2**32 hashes, so coins are equal on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_triton.numerics import INTERPRETED

_BLOCK = 1024
_MASK = 0xFFFFFFFF
_LARGEST_COIN = 1 - 2**-24


@dataclass(frozen=True)
class CoinBuffers:
    """Where a step's coins lie; their addresses may be captured.

    Attributes:
        reject: fp32 ``[bs, D]``, contiguous; a slice of a ``[bs, D + 1]`` matrix is not.
        final: fp32 ``[bs]``, contiguous.
    """

    reject: Tensor
    final: Tensor

    def __post_init__(self) -> None:
        bs = self.final.shape[0]
        if self.reject.dim() != 2 or self.final.dim() != 1 or self.reject.shape[0] != bs or self.reject.shape[1] < 1:
            raise ValueError(
                f"dsv4_triton.CoinBuffers: expected reject [bs, D >= 1] and final [bs], got {tuple(self.reject.shape)} "
                f"and {tuple(self.final.shape)}"
            )
        for name, tensor in (("reject", self.reject), ("final", self.final)):
            if tensor.dtype != torch.float32 or not tensor.is_contiguous():
                raise ValueError(
                    f"dsv4_triton.CoinBuffers: {name} must be contiguous float32, got {tensor.dtype} with strides "
                    f"{tensor.stride()}; use CoinBuffers.allocate, or .contiguous() on a slice"
                )

    @classmethod
    def allocate(cls, bs: int, draft_token_num: int, device: torch.device | str) -> CoinBuffers:
        return cls(
            torch.zeros(bs, draft_token_num, dtype=torch.float32, device=device),
            torch.zeros(bs, dtype=torch.float32, device=device),
        )

    def rows(self, bs: int) -> CoinBuffers:
        """The first ``bs`` requests, over the same memory."""
        return CoinBuffers(self.reject[:bs], self.final[:bs])


@triton.jit
def _round(h, k):
    k = k * 0xCC9E2D51
    k = (k << 15) | (k >> 17)
    k = k * 0x1B873593
    h = h ^ k
    h = (h << 13) | (h >> 19)
    return h * 5 + 0xE6546B64


@triton.jit
def murmur3(seed, position, column):
    """uint32 hash of uint64 ``seed``, uint32 ``position`` and uint32 ``column``, which broadcast."""
    h = _round(tl.zeros_like(column), (seed & 0xFFFFFFFF).to(tl.uint32))
    h = _round(h, (seed >> 32).to(tl.uint32))
    h = _round(h, position)
    h = _round(h, column)
    h = h ^ 16
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def uniform(h):
    """uint32 -> fp64 in the closed interval [0, 1]."""
    return h.to(tl.float64) / 4294967295.0


@triton.jit
def coin(h):
    """uint32 -> fp32 in [0, 1)."""
    u = uniform(h).to(tl.float32)
    return tl.minimum(u, 0.999999940395355224609375)


@triton.jit
def row_key(seeds, positions, row):
    """A row's uint64 seed and the low 32 bits of its position."""
    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row).to(tl.uint64, bitcast=True)
    return seed, (position & 0xFFFFFFFF).to(tl.uint32)


@triton.jit(do_not_specialize=["m"])
def _hash_kernel(seeds, positions, columns, out, m, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seed, position = row_key(seeds, positions, row)
    column = (tl.load(columns + at, mask=at < m, other=0) & 0xFFFFFFFF).to(tl.uint32)
    tl.store(out + row * m + at, murmur3(seed, position, column), mask=at < m)


@triton.jit(do_not_specialize=["drafts"])
def _coin_kernel(
    seeds, lengths, reject, final, drafts, BLOCK: tl.constexpr, HASH: tl.constexpr, COIN: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seed, length = row_key(seeds, lengths, row)
    drawn = COIN(HASH(seed, length, column.to(tl.uint32)))
    tl.store(reject + row * drafts + column, drawn, mask=column < drafts)
    tl.store(final + row + column * 0, drawn, mask=column == drafts)


def murmur_hash(seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """uint32 ``[n, m]`` hashes of int64 ``seeds [n]``, ``positions [n]`` and ``columns [m]``."""
    check_keys(seeds, positions, "murmur_hash")
    if columns.dtype != torch.int64 or columns.dim() != 1:
        raise ValueError(f"dsv4_triton.murmur_hash: columns must be int64 [m], got {columns.dtype} {columns.dim()}-d")
    if not runs_kernels(seeds):
        return murmur_hash_twin(seeds, positions, columns)
    n, m = seeds.shape[0], columns.shape[0]
    out = torch.empty(n, m, dtype=torch.uint32, device=seeds.device)
    if n and m:
        _hash_kernel[(n, triton.cdiv(m, _BLOCK))](
            seeds, positions, columns.contiguous(), out, m, BLOCK=_BLOCK, enable_fp_fusion=False
        )
    return out


def murmur_hash_twin(seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """``murmur_hash`` in int64 torch operators, for tensors that lie on a CPU beside compiled kernels."""
    h = torch.zeros(seeds.shape[0], columns.shape[0], dtype=torch.int64, device=seeds.device)
    for word in (seeds[:, None], seeds[:, None] >> 32, positions[:, None], columns[None, :]):
        # a product of two 32-bit words may wrap in int64; its low 32 bits are right all the same
        k = (word & _MASK) * 0xCC9E2D51 & _MASK
        k = _rotate_twin(k, 15) * 0x1B873593 & _MASK
        h = (_rotate_twin(h ^ k, 13) * 5 + 0xE6546B64) & _MASK
    h = h ^ 16
    h = (h ^ h >> 16) * 0x85EBCA6B & _MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & _MASK
    return (h ^ h >> 16).to(torch.uint32)


def coin_twin(hashes: Tensor) -> Tensor:
    """fp32 coins of uint32 (or int64, 0 to 2**32 - 1) hashes in torch operators."""
    return (hashes.to(torch.float64) / 4294967295.0).to(torch.float32).clamp(max=_LARGEST_COIN)


def batch_seeds(seeds: Sequence[int | None], device: torch.device | str) -> Tensor | None:
    """int64 ``[bs]`` if every request has a seed (its low 64 bits count), None if none has.

    ValueError for a mixture: a batch is seeded or it is not, because one kernel draws for all rows.
    """
    missing = [row for row, seed in enumerate(seeds) if seed is None]
    if not missing and seeds:
        signed = [((seed or 0) + 2**63) % 2**64 - 2**63 for seed in seeds]
        return torch.tensor(signed, dtype=torch.int64, device=device)
    if len(missing) == len(seeds):
        return None
    raise ValueError(
        f"dsv4_triton.batch_seeds: {len(seeds)} requests, without a seed: rows {missing}. Seed every request of the "
        "batch or none; a scheduler keeps the two kinds apart"
    )


def draw_coins(seeds: Tensor | None, lengths: Tensor, out: CoinBuffers) -> None:
    """Fill ``out`` for one verify step.

    Args:
        seeds: int64 ``[bs]``, or None for an unseeded batch: then the coins come from torch's global generator and
            nothing is hashed.
        lengths: int64 ``[bs]``, committed lengths before this verify.
        out: buffers of exactly ``bs`` requests; see ``CoinBuffers.rows``.

    Raises:
        ValueError: shapes that do not match, as of unpadded seeds and a padded batch, or another dtype than int64.
    """
    if seeds is None:
        torch.rand(out.reject.shape, dtype=torch.float32, device=out.reject.device, out=out.reject)
        torch.rand(out.final.shape, dtype=torch.float32, device=out.final.device, out=out.final)
        return
    check_keys(seeds, lengths, "draw_coins")
    if seeds.shape[0] != out.final.shape[0]:
        raise ValueError(
            f"dsv4_triton.draw_coins: {seeds.shape[0]} seeds for buffers of {out.final.shape[0]} requests; pad both or "
            "neither (CoinBuffers.rows)"
        )
    if runs_kernels(seeds):
        launch_coins(seeds, lengths, out)
    else:
        drafts = out.reject.shape[1]
        drawn = coin_twin(murmur_hash_twin(seeds, lengths, torch.arange(drafts + 1, device=seeds.device)))
        out.reject.copy_(drawn[:, :drafts])
        out.final.copy_(drawn[:, drafts])


def launch_coins(seeds: Tensor, lengths: Tensor, out: CoinBuffers, hasher: Any = murmur3, to_coin: Any = coin) -> None:
    """The kernel of ``draw_coins``; tests put another hash or another map in, to show which column goes where."""
    bs, drafts = out.reject.shape
    if bs:
        _coin_kernel[(bs, triton.cdiv(drafts + 1, _BLOCK))](
            seeds, lengths, out.reject, out.final, drafts,
            BLOCK=min(_BLOCK, triton.next_power_of_2(drafts + 1)), HASH=hasher, COIN=to_coin,
            enable_fp_fusion=False,
        )  # fmt: skip


def runs_kernels(tensor: Tensor) -> bool:
    return bool(INTERPRETED) or tensor.is_cuda


def check_keys(seeds: Tensor, positions: Tensor, where: str) -> None:
    if seeds.dtype != torch.int64 or positions.dtype != torch.int64:
        raise ValueError(
            f"dsv4_triton.{where}: seeds and positions must be int64, got {seeds.dtype} and {positions.dtype}; a seed "
            "has 64 bits and narrowing it makes different requests draw the same coins"
        )
    if not seeds.is_contiguous() or not positions.is_contiguous():
        raise ValueError(
            f"dsv4_triton.{where}: seeds and positions must be contiguous, got strides {seeds.stride()} and "
            f"{positions.stride()}; a slice of a wider tensor needs .contiguous()"
        )
    if seeds.dim() != 1 or seeds.shape != positions.shape:
        raise ValueError(
            f"dsv4_triton.{where}: seeds {tuple(seeds.shape)} and positions {tuple(positions.shape)} must both be [n]; "
            "unpad the batch before its coins are drawn"
        )


def _rotate_twin(x: Tensor, by: int) -> Tensor:
    return (x << by | x >> 32 - by) & _MASK
