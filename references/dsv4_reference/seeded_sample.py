"""The seeded plain sampler: Gumbel-max over the vocabulary with one coin a column, in fp64.

With u the fp64 uniform of (seed, position, column)::

    token = argmax(logprob + g),    g = -log(-log u)

Both ends are closed. u = 1 (hash 0xFFFFFFFF) would give g = +inf, and NaN on a masked column, so that a forbidden token
wins: log u is capped at -2**-32, g = 32 ln 2. u = 0 has log u = -inf, floored at the lowest fp64, g = -709.78. Every
other value is untouched, so drawing at midpoints, which would change all of them, is not done.

The logarithm is the platform's: g is good to an ulp, not to the bit, between a CPU and a GPU.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dsv4_reference.chain_verify import argmax
from dsv4_reference.coins import hash_columns, uniform

LOG_U_CAP = -(2.0**-32)


def gumbel(hashes: ArrayLike) -> NDArray[np.float64]:
    """g of uint32 hashes, fp64, finite everywhere: from -709.78 to 32 ln 2."""
    with np.errstate(divide="ignore"):
        log_u = np.log(uniform(hashes))
    g: NDArray[np.float64] = -np.log(-np.clip(log_u, np.finfo(np.float64).min, LOG_U_CAP))
    return g


def seeded_sample(logprobs: NDArray[np.floating], seeds: ArrayLike, positions: ArrayLike) -> NDArray[np.int32]:
    """One token a row.

    Args:
        logprobs: ``[bs, V]``, any float; -inf where masked. Constant offsets do not matter, so logits will do.
        seeds, positions: integers ``[bs]``; the position is that of the token to be drawn.

    Returns:
        int32 ``[bs]``, lowest index on ties. A row without any finite value gives 0.

    Raises:
        ValueError: seeds and positions do not both match the rows, as with a batch that is still padded.
    """
    bs, vocabulary = logprobs.shape
    hashes = hash_columns(seeds, positions, np.arange(vocabulary))
    if hashes.shape[0] != bs:
        raise ValueError(
            f"dsv4_reference.seeded_sample: {bs} rows of logprobs but {hashes.shape[0]} seeds; unpad both or neither"
        )
    return argmax(logprobs.astype(np.float64) + gumbel(hashes))


def seeded_sample_sorted(logprobs: NDArray[np.floating], seeds: ArrayLike, positions: ArrayLike) -> NDArray[np.int32]:
    """The same as the top-k/top-p path draws it: the column of a coin is the rank after a stable descending sort."""
    order = np.argsort(-logprobs, axis=1, kind="stable")
    rank = seeded_sample(np.take_along_axis(logprobs, order, axis=1), seeds, positions)
    return np.take_along_axis(order, rank[:, None].astype(np.int64), axis=1)[:, 0].astype(np.int32)
