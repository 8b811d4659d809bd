"""Seeded coins: MurmurHash3 of (seed, position, column) as a uniform number, so that a verdict repeats bit for bit.

Hash: MurmurHash3_x86_32 (Austin Appleby, public domain), hash seed 0, over the 16 little-endian bytes
``<u64 seed><u32 position><u32 column>``. Negative seeds are their two's complement, positions and columns their low
32 bits, so positions 2**32 apart collide by design. Coin (SGLang ``eagle_utils``)::

    u    = float64(h) / (2**32 - 1)             in the closed interval [0, 1]
    coin = min(float32(u), 1 - 2**-24)          half open: the clamp is what keeps 1.0 out

129 hashes round to 1.0 before the clamp: the division lands 0xFFFFFF7F on the midpoint 1 - 2**-25 in fp64, and ties to
even sends it up. Any other route (exact arithmetic, 2**32 as divisor, fp32 before the division) gives 128.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from operator import index
from typing import SupportsIndex, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

UINT32_MAX = 0xFFFFFFFF
LARGEST_COIN = np.float32(1 - 2**-24)

_C1, _C2 = 0xCC9E2D51, 0x1B873593
_MIX1, _MIX2 = 0x85EBCA6B, 0xC2B2AE35

#: seeds [n], positions [n], columns [m] -> uint32 [n, m]
HashColumns = Callable[[ArrayLike, ArrayLike, ArrayLike], NDArray[np.uint32]]


def murmur3_32(data: bytes) -> int:
    """MurmurHash3_x86_32 with hash seed 0 of whole 4-byte blocks, in Python integers."""
    if len(data) % 4:
        raise ValueError(f"dsv4_reference.murmur3_32: {len(data)} bytes; this form takes whole blocks of 4 only")
    h = 0
    for (k,) in struct.iter_unpack("<I", data):
        k = _rotate(k * _C1 & UINT32_MAX, 15) * _C2 & UINT32_MAX
        h = (_rotate(h ^ k, 13) * 5 + 0xE6546B64) & UINT32_MAX
    h ^= len(data)
    h = (h ^ h >> 16) * _MIX1 & UINT32_MAX
    h = (h ^ h >> 13) * _MIX2 & UINT32_MAX
    return h ^ h >> 16


def coin_hash(seed: int, position: int, column: int) -> int:
    """The hash of one coin; ``seed`` is any signed or unsigned 64-bit integer."""
    return murmur3_32(struct.pack("<QII", seed % 2**64, position % 2**32, column % 2**32))


def hash_columns(seeds: ArrayLike, positions: ArrayLike, columns: ArrayLike) -> NDArray[np.uint32]:
    """``coin_hash`` of every (row, column): integers ``[n]``, ``[n]`` and ``[m]`` -> uint32 ``[n, m]``.

    ValueError if seeds and positions are not one-dimensional and equally long: a padded batch against unpadded seeds.
    """
    seed, position, column = _low64(seeds), _low64(positions), _low64(columns)
    if seed.ndim != 1 or position.shape != seed.shape or column.ndim != 1:
        raise ValueError(
            f"dsv4_reference.hash_columns: seeds {seed.shape} and positions {position.shape} must both be [n], columns "
            f"{column.shape} [m]; unpad the batch before its coins are drawn"
        )
    shape = (seed.shape[0], column.shape[0])
    h = np.zeros(shape, dtype=np.uint32)
    for word in (seed[:, None], seed[:, None] >> np.uint64(32), position[:, None], column[None, :]):
        k = np.broadcast_to(word, shape).astype(np.uint32)
        k = _rotate_array(k * np.uint32(_C1), 15) * np.uint32(_C2)
        h = _rotate_array(h ^ k, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    h = h ^ np.uint32(16)
    h = (h ^ h >> np.uint32(16)) * np.uint32(_MIX1)
    h = (h ^ h >> np.uint32(13)) * np.uint32(_MIX2)
    return h ^ h >> np.uint32(16)


def uniform(hashes: ArrayLike) -> NDArray[np.float64]:
    """fp64 in the closed interval [0, 1] of uint32 hashes; the seeded sampler keeps this width."""
    return np.asarray(hashes, dtype=np.uint32).astype(np.float64) / np.float64(UINT32_MAX)


def coin(hashes: ArrayLike) -> NDArray[np.float32]:
    """fp32 in [0, 1) of uint32 hashes, at most 1 - 2**-24."""
    return np.minimum(uniform(hashes).astype(np.float32), LARGEST_COIN)


def verify_coins(
    seeds: ArrayLike, lengths: ArrayLike, draft_token_num: int, *, hasher: HashColumns = hash_columns
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The coins of one verify step.

    Args:
        seeds: 64-bit integers ``[bs]``.
        lengths: committed length of each request before this verify, ``[bs]``; not the padded batch's positions.
        draft_token_num: D, verify slots a request, the root included.
        hasher: replaced in tests only, to show which column goes where.

    Returns:
        Contiguous fp32 ``reject [bs, D]`` of columns 0 to D - 1 and ``final [bs]`` of column D.
    """
    if draft_token_num < 1:
        raise ValueError(f"dsv4_reference.verify_coins: draft_token_num is {draft_token_num}; the root alone makes 1")
    drawn = coin(hasher(seeds, lengths, np.arange(draft_token_num + 1)))
    return np.ascontiguousarray(drawn[:, :draft_token_num]), np.ascontiguousarray(drawn[:, draft_token_num])


def _low64(values: ArrayLike) -> NDArray[np.uint64]:
    """Integers of any sign as their low 64 bits. TypeError for anything that is not an integer."""
    if not isinstance(values, np.ndarray):
        # item by item: numpy makes float64 of a list that holds both -1 and 2**64 - 1
        return np.array([index(value) % 2**64 for value in cast("Iterable[SupportsIndex]", values)], dtype=np.uint64)
    if values.dtype.kind not in "iu":
        raise TypeError(f"dsv4_reference.coins: seeds, positions and columns are integers, got {values.dtype}")
    return values.astype(np.int64).view(np.uint64) if values.dtype.kind == "i" else values.astype(np.uint64)


def _rotate(x: int, by: int) -> int:
    return (x << by | x >> 32 - by) & UINT32_MAX


def _rotate_array(x: NDArray[np.uint32], by: int) -> NDArray[np.uint32]:
    return x << np.uint32(by) | x >> np.uint32(32 - by)
