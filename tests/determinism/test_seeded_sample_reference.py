"""The plain seeded sampler: its two ends, masked columns, ties, and the distribution that it draws from."""

from __future__ import annotations

import numpy as np
import pytest
from dsv4_reference.coins import coin_hash, uniform
from dsv4_reference.seeded_sample import gumbel, seeded_sample, seeded_sample_sorted

#: (seed, position, column) whose hash is 0xFFFFFFFF: the column that used to win everything
TOP = (7847, 12345, 1208)


def test_endpoint_values():
    top, next_to_top, zero = gumbel([0xFFFFFFFF, 0xFFFFFFFE, 0])
    assert top == 32 * np.log(2) == 22.18070977791825
    assert next_to_top == 22.180709777801834
    assert round(zero, 2) == -709.78


def test_only_the_endpoint_is_changed():
    hashes = np.concatenate([np.arange(1, 5000), np.arange(0xFFFFF000, 0xFFFFFFFF)]).astype(np.uint32)
    assert np.array_equal(gumbel(hashes), -np.log(-np.log(uniform(hashes))))


def forbidden_wins(sampler):
    """Whether a masked column is drawn where its hash is all ones."""
    seed, position, column = TOP
    logprobs = np.zeros((1, column + 5))
    logprobs[0, column] = -np.inf
    return int(sampler(logprobs, [seed], [position])[0]) == column


def test_masked_column_is_never_drawn():
    assert coin_hash(*TOP) == 0xFFFFFFFF

    def uncapped(logprobs, seeds, positions):
        hashes = [[coin_hash(seeds[0], positions[0], c) for c in range(logprobs.shape[1])]]
        with np.errstate(divide="ignore", invalid="ignore"):
            scores = logprobs - np.log(-np.log(uniform(hashes)))
        return np.argmax(scores, axis=1)  # numpy, like torch, takes NaN for the largest

    assert forbidden_wins(uncapped)
    assert not forbidden_wins(seeded_sample)


def test_rows_do_not_see_each_other():
    generator = np.random.default_rng(7)
    logprobs = generator.normal(size=(6, 300))
    seeds, positions = np.arange(6) * 13 - 20, np.arange(6) + 2**32
    together = seeded_sample(logprobs, seeds, positions)
    order = [3, 0, 5, 2, 2]
    assert seeded_sample(logprobs[order], seeds[order], positions[order]).tolist() == together[order].tolist()


def test_lengths_must_match():
    with pytest.raises(ValueError, match="unpad"):
        seeded_sample(np.zeros((3, 4)), [1, 2], [1, 2])
    with pytest.raises(ValueError, match="unpad"):
        seeded_sample(np.zeros((2, 4)), [1, 2], [1, 2, 3])


def test_distribution():
    p = np.array([0.5, 0.25, 0.125, 0.125, 0.0])
    with np.errstate(divide="ignore"):
        logprobs = np.broadcast_to(np.log(p), (20_000, 5))
    drawn = np.bincount(seeded_sample(logprobs, np.arange(20_000), np.full(20_000, 3)), minlength=5)
    assert drawn[4] == 0
    mean = p[:4] * 20_000
    assert ((drawn[:4] - mean) ** 2 / mean).sum() < 16.27  # 0.1 %, 3 degrees of freedom


def test_sorted_path_uses_ranks_and_a_stable_sort():
    logprobs = np.log(np.array([[0.1, 0.4, 0.1, 0.4]]))
    seeds, positions = [5], [9]
    ranked = seeded_sample(np.log(np.array([[0.4, 0.4, 0.1, 0.1]])), seeds, positions)[0]
    assert seeded_sample_sorted(logprobs, seeds, positions)[0] == [1, 3, 0, 2][ranked]
    differing = 0
    for seed in range(64):
        stable = seeded_sample_sorted(logprobs, [seed], positions)[0]
        rank = seeded_sample(np.log(np.array([[0.4, 0.4, 0.1, 0.1]])), [seed], positions)[0]
        differing += stable != [3, 1, 2, 0][rank]  # an unstable sort may give this order
    assert differing > 0


def test_row_without_finite_value_gives_zero():
    assert seeded_sample(np.full((1, 4), -np.inf), [1], [1]).tolist() == [0]
    assert seeded_sample(np.array([[np.nan, 0.0]]), [1], [1]).tolist() == [1]
