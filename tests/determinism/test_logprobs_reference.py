"""The fixed form of log_softmax is accurate, its bits belong to the row alone, and log(softmax) is told apart."""

from __future__ import annotations

import numpy as np
import pytest
from dsv4_reference.logprobs import exp_bits, log_bits, log_softmax, log_softmax_bits


def random_logits(rows, columns, scale=4.0):
    return (np.random.default_rng(rows * columns).normal(size=(rows, columns)) * scale).astype(np.float32)


def bits(array):
    return array.view(np.uint32)


def log_of_softmax(logits):
    """What decode used to return, in fp32."""
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    with np.errstate(divide="ignore"):
        return np.log(shifted / shifted.sum(axis=1, keepdims=True, dtype=np.float32))


def test_exp_and_log_are_good_to_an_ulp():
    x = -np.linspace(0, 87, 200_001).astype(np.float32)
    truth = np.exp(x.astype(np.float64))
    assert (np.abs(exp_bits(x) - truth) / np.spacing(truth.astype(np.float32))).max() < 1.01
    x = np.linspace(1, 200_000, 200_001).astype(np.float32)
    truth = np.log(x.astype(np.float64))
    assert (np.abs(log_bits(x) - truth)[1:] / np.spacing(truth[1:].astype(np.float32))).max() < 1.01
    assert exp_bits(np.float32([0, -88, -1e30, -np.inf])).tolist() == [1, 0, 0, 0]
    assert np.isnan(exp_bits(np.float32([np.nan]))).all()
    assert log_bits(np.float32([1])).tolist() == [0]


@pytest.mark.parametrize("columns", [1, 7, 1024, 1025, 5000])
@pytest.mark.parametrize("hot", [False, True])
def test_accuracy(columns, hot):
    logits = random_logits(8, columns)
    temperature = np.float32([1.0, 0.7, 0.3, 2.0, 1.0, 0.7, 0.3, 2.0]) if hot else None
    error = np.abs(log_softmax_bits(logits, temperature) - log_softmax(logits, temperature))
    truth = np.abs(log_softmax(logits, temperature))
    assert (error <= 3 * 2.0**-23 * (truth + np.log(columns + 1) + 1)).all()


def test_a_coarse_form_would_fail_the_accuracy_bound():
    logits = random_logits(8, 5000)
    truth = log_softmax(logits)
    halved = logits.astype(np.float16).astype(np.float32)
    error = np.abs(log_softmax_bits(halved) - truth)
    assert (error > 3 * 2.0**-23 * (np.abs(truth) + np.log(5001) + 1)).any()


def test_a_row_does_not_see_other_rows():
    logits = random_logits(16, 1500)
    together = log_softmax_bits(logits)
    order = [5, 5, 0, 15]
    assert np.array_equal(bits(log_softmax_bits(logits[order])), bits(together[order]))
    assert np.array_equal(bits(log_softmax_bits(logits[3:4])), bits(together[3:4]))


def test_masked_padding_leaves_the_bits_alone_and_other_padding_does_not():
    logits = random_logits(4, 1000)
    masked = np.concatenate([logits, np.full((4, 600), -np.inf, np.float32)], axis=1)
    assert np.array_equal(bits(log_softmax_bits(masked)[:, :1000]), bits(log_softmax_bits(logits)))
    zeros = np.concatenate([logits, np.zeros((4, 600), np.float32)], axis=1)
    assert not np.array_equal(bits(log_softmax_bits(zeros)[:, :1000]), bits(log_softmax_bits(logits)))


def test_order_of_the_sum_is_visible():
    """Another split of the same row gives other bits somewhere, so that comparing bits does compare the order."""
    logits = random_logits(32, 4096)
    d = logits - logits.max(axis=1, keepdims=True)
    in_sequence = np.add.accumulate(exp_bits(d), axis=1, dtype=np.float32)[:, -1:]
    assert not np.array_equal(bits(d - log_bits(in_sequence)), bits(log_softmax_bits(logits)))


def test_log_of_softmax_is_told_apart():
    logits = random_logits(64, 4096)
    differing = bits(log_of_softmax(logits)) != bits(log_softmax_bits(logits))
    assert differing.mean() > 0.02
    far = np.zeros((1, 8), dtype=np.float32)
    far[0, 3] = -200
    assert log_of_softmax(far)[0, 3] == -np.inf
    assert np.isfinite(log_softmax_bits(far)).all()
    assert log_softmax_bits(far)[0, 3] == pytest.approx(-200 - np.log(7))


def test_masked_columns_and_rows():
    logits = random_logits(3, 40)
    logits[0, ::2] = -np.inf
    logits[1] = -np.inf
    logits[2, 1:] = -np.inf
    got = log_softmax_bits(logits)
    assert (got[0, ::2] == -np.inf).all()
    assert np.isfinite(got[0, 1::2]).all()
    assert (got[1] == -np.inf).all()
    assert got[2, 0] == 0
    assert not np.isnan(log_softmax(logits)).any()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poison_stays_in_its_row(poison):
    logits = random_logits(2, 40)
    clean = log_softmax_bits(logits)
    logits[0, 5] = poison
    got = log_softmax_bits(logits)
    assert np.isnan(got[0]).all()
    assert np.array_equal(bits(got[1]), bits(clean[1]))
