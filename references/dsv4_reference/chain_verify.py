"""Which drafted tokens are kept, and which token follows: the three rules for a chain, in fp32 with sequential sums.

Slots 0 .. D - 1 of a request hold its chain, slot 0 the last committed token (the root). ``target[b, j]`` is the
target model's distribution after slots 0 .. j, ``draft[b, j]`` the proposal that slot j + 1 was drawn from. Step j
(1 .. D - 1) reads rejection coin j - 1, so column D - 1 is never read in a chain. Rules (arXiv:2211.17192, SGLang's
chain and tree kernels with no siblings):

    greedy       keep slot j while it equals argmax(target[j - 1]); ties go to the lowest index; no coins
    target only  keep while coin <= p / threshold_acc or p >= threshold_single, p the target mass of the drafted token
    classic      keep while coin * q < p, strictly; a NaN q counts as 0

The last row that was reached gives the final token by inverse transform over ``m``: the first index whose running sum
exceeds coin * sum(m). m is the target row if everything was kept; else, target only: the target row without the
refused token; classic: max(target - draft, 0). Without such an index the last one with mass is taken (target only), or
the last of the vocabulary (classic, and wherever there is no mass at all). A NaN mass counts as 0.

Sums run in index order, so that every device can form the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer]
Floats = NDArray[np.float32]

SMALLEST_THRESHOLD_ACC = np.float32(1e-9)


@dataclass(frozen=True)
class ChainVerdict:
    """What one verify step decides; all int32, -1 where nothing is defined.

    Attributes:
        predict: ``[bs * D]``, the token that follows each kept slot; slot (b, j) has index b * D + j.
        accept_index: ``[bs, D]``, indices of the kept slots in order, the root first.
        counts: ``[bs]``, kept drafts; the caller's accept length is one more.
    """

    predict: NDArray[np.int32]
    accept_index: NDArray[np.int32]
    counts: NDArray[np.int32]


def argmax(rows: NDArray[np.floating]) -> NDArray[np.int32]:
    """Index of the largest value along the last axis, lowest index on ties; NaN counts as -inf."""
    best: NDArray[np.int32] = np.where(np.isnan(rows), -np.inf, rows).argmax(axis=-1).astype(np.int32)
    return best


def verify_greedy(tokens: Ints, target: NDArray[np.floating]) -> ChainVerdict:
    """``tokens [bs, D]``, ``target [bs, D, V]`` logits or probabilities."""
    best = argmax(target)
    counts = _leading(tokens[:, 1:] == best[:, :-1])
    return _verdict(tokens, counts, best[np.arange(len(counts)), counts])


def verify_target_only(
    tokens: Ints,
    target: Floats,
    reject: Floats,
    final: Floats,
    *,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> ChainVerdict:
    """``tokens [bs, D]``, ``target [bs, D, V]`` fp32, coins ``reject [bs, D]`` and ``final [bs]`` fp32.

    The comparison with the coin is ``<=`` as upstream has it: a coin of exactly 0 (hash 0) keeps a token of mass 0.
    """
    p = _mass_of(target[:, :-1], tokens[:, 1:])
    accumulated = p / np.maximum(np.float32(threshold_acc), SMALLEST_THRESHOLD_ACC)
    counts = _leading((reject[:, : p.shape[1]] <= accumulated) | (p >= np.float32(threshold_single)))
    mass = _positive(target[np.arange(len(counts)), counts])
    refused = np.flatnonzero(counts < p.shape[1])
    token = tokens[refused, counts[refused] + 1]
    inside = (token >= 0) & (token < mass.shape[1])
    mass[refused[inside], token[inside]] = 0
    return _verdict(tokens, counts, _draw(mass, final, fall_back_to_mass=True))


def verify_classic(tokens: Ints, target: Floats, draft: Floats, reject: Floats, final: Floats) -> ChainVerdict:
    """As ``verify_target_only``, with the proposal ``draft [bs, D - 1, V]`` fp32; it has no row for the last slot."""
    p, q = _mass_of(target[:, :-1], tokens[:, 1:]), _mass_of(draft, tokens[:, 1:])
    counts = _leading(reject[:, : p.shape[1]] * q < p)
    rows = np.arange(len(counts))
    mass = target[rows, counts].astype(np.float32)
    refused = np.flatnonzero(counts < p.shape[1])
    proposal = draft[refused, counts[refused]]
    mass[refused] -= np.where(np.isnan(proposal), np.float32(0), proposal)
    return _verdict(tokens, counts, _draw(_positive(mass), final, fall_back_to_mass=False))


def _mass_of(rows: Floats, tokens: Ints) -> Floats:
    """fp32 ``[bs, D - 1]``: each row's value at its token; 0 for NaN and for tokens outside the vocabulary."""
    inside = (tokens >= 0) & (tokens < rows.shape[-1])
    picked = np.take_along_axis(rows, np.where(inside, tokens, 0)[..., None], axis=-1)[..., 0]
    return np.where(inside & ~np.isnan(picked), picked, np.float32(0)).astype(np.float32)


def _leading(kept: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Number of leading True in each row."""
    leading: NDArray[np.int64] = np.logical_and.accumulate(kept, axis=1).sum(axis=1)
    return leading


def _positive(mass: Floats) -> Floats:
    return np.where(mass > 0, mass, np.float32(0)).astype(np.float32)


def _draw(mass: Floats, coins: Floats, *, fall_back_to_mass: bool) -> NDArray[np.int64]:
    """``[bs]`` indices; ``np.add.accumulate`` adds strictly one after the other, in the dtype it is given."""
    running = np.add.accumulate(mass, axis=1, dtype=np.float32)
    beyond = running > (coins * running[:, -1])[:, None]
    last = mass.shape[1] - 1
    positive = mass > 0
    has_mass = last - positive[:, ::-1].argmax(axis=1) if fall_back_to_mass else np.full(len(mass), last)
    return np.where(beyond.any(axis=1), beyond.argmax(axis=1), np.where(positive.any(axis=1), has_mass, last))


def _verdict(tokens: Ints, counts: NDArray[np.int64], final: Ints) -> ChainVerdict:
    bs, width = tokens.shape
    slot = np.arange(width)
    index = (np.arange(bs)[:, None] * width + slot).astype(np.int32)
    following = np.concatenate([tokens[:, 1:], np.full((bs, 1), -1, dtype=tokens.dtype)], axis=1)
    predict = np.where(slot < counts[:, None], following, -1)
    predict[np.arange(bs), counts] = final
    return ChainVerdict(
        predict=predict.astype(np.int32).reshape(-1),
        accept_index=np.where(slot <= counts[:, None], index, -1).astype(np.int32),
        counts=counts.astype(np.int32),
    )
