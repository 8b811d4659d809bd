"""The chain kernels give the reference's verdict exactly, for real and for hostile distributions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dsv4_reference import chain_verify as reference
from dsv4_reference import coins as reference_coins
from dsv4_triton.chain_verify import (
    VerifyBuffers,
    launch_sampling,
    row_argmax,
    verify_classic,
    verify_greedy,
    verify_target_only,
)
from dsv4_triton.coins import CoinBuffers


def put(array, device):
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def same(out, verdict):
    return (
        np.array_equal(out.predict.cpu().numpy(), verdict.predict)
        and np.array_equal(out.accept_index.cpu().numpy(), verdict.accept_index)
        and np.array_equal(out.counts.cpu().numpy(), verdict.counts)
    )


def run(rule, device, tokens, target, draft, reject, final, **options):
    out = VerifyBuffers.allocate(*tokens.shape, device)
    buffers = CoinBuffers(put(reject, device), put(final, device))
    if rule == "classic":
        verify_classic(put(tokens, device), put(target, device), put(draft, device), buffers, out)
    else:
        verify_target_only(put(tokens, device), put(target, device), buffers, out, **options)
    return out


def expected(rule, tokens, target, draft, reject, final, **options):
    if rule == "classic":
        return reference.verify_classic(tokens, target, draft, reject, final)
    return reference.verify_target_only(tokens, target, reject, final, **options)


def batch(generator, bs, width, vocabulary):
    """Peaked distributions, drafts that are often right, coins of the hash."""
    logits = 4 * generator.normal(size=(bs, width, vocabulary))
    noise = logits[:, :-1] + 0.5 * generator.normal(size=(bs, width - 1, vocabulary))

    def softmax(x):
        e = np.exp(x - x.max(axis=-1, keepdims=True))
        return (e / e.sum(axis=-1, keepdims=True)).astype(np.float32)

    tokens = np.full((bs, width), 1, dtype=np.int64)
    tokens[:, 1:] = noise.argmax(axis=-1)
    coins = reference_coins.verify_coins(generator.integers(-(2**63), 2**63, bs), np.arange(bs) + 5, width)
    return tokens, softmax(logits), softmax(noise), *coins


@pytest.mark.parametrize("rule", ["target-only", "classic"])
def test_worked_rows(vectors, worked, device, rule):
    rows = [row for row in vectors["chains"] if row["rule"] == rule]
    coins = reference_coins.verify_coins([row["seed"] for row in rows], [row["length"] for row in rows], 4)
    tokens = np.array([row["tokens"] for row in rows])
    target, draft = (np.repeat(part, len(rows), axis=0) for part in worked)
    out = run(rule, device, tokens, target, draft, *coins)
    predict = out.predict.cpu().numpy().reshape(len(rows), 4)
    for at, row in enumerate(rows):
        count = len(row["kept"])
        assert out.counts[at] == count
        assert predict[at].tolist() == [*row["kept"], row["final"], *[-1] * (3 - count)]


@pytest.mark.parametrize("rule", ["target-only", "classic"])
@pytest.mark.parametrize(("bs", "width", "vocabulary"), [(24, 4, 300), (5, 2, 1025), (3, 8, 7), (2, 1, 64)])
def test_equal_to_the_reference(generator, device, rule, bs, width, vocabulary):
    inputs = batch(generator, bs, width, vocabulary)
    assert same(run(rule, device, *inputs), expected(rule, *inputs))
    assert same(run(rule, device, inputs[0].astype(np.int32), *inputs[1:]), expected(rule, *inputs))


def test_full_vocabulary(generator, device):
    inputs = batch(generator, 2, 3, 129_280)
    for rule in ("target-only", "classic"):
        assert same(run(rule, device, *inputs), expected(rule, *inputs))


@pytest.mark.parametrize("rule", ["target-only", "classic"])
def test_every_count_is_reached(generator, device, rule):
    """A comparison of counts proves nothing if all are equal."""
    inputs = batch(generator, 64, 4, 16)
    assert set(expected(rule, *inputs).counts.tolist()) == {0, 1, 2, 3}
    assert same(run(rule, device, *inputs), expected(rule, *inputs))


@pytest.mark.parametrize("rule", ["target-only", "classic"])
def test_the_interpreters_form_of_the_draw_equals_the_compiled_one(generator, device, rule):
    if device != "cpu":
        pytest.skip("both forms run in the interpreter only; a GPU runs the scalar one in every other test here")
    tokens, target, draft, reject, final = batch(generator, 4, 3, 21)
    verdict = expected(rule, tokens, target, draft, reject, final)
    for whole in (True, False):
        out = VerifyBuffers.allocate(4, 3, device)
        launch_sampling(
            put(tokens, device), put(target, device), put(draft, device) if rule == "classic" else None,
            CoinBuffers(put(reject, device), put(final, device)), out, whole=whole,
        )  # fmt: skip
        assert same(out, verdict)


@pytest.mark.parametrize("rule", ["target-only", "classic"])
def test_sums_run_in_index_order(device, rule):
    """1 + 2**-24 is 1 however often it is added, but small terms that are summed first do count."""
    vocabulary = 64
    target = np.zeros((1, 1, vocabulary), dtype=np.float32)
    target[0, 0, 0] = 1
    target[0, 0, 1:] = np.float32(2**-24)
    tokens, draft = np.array([[0]]), np.zeros((1, 0, vocabulary), dtype=np.float32)
    reject, final = np.zeros((1, 1), np.float32), np.array([reference_coins.LARGEST_COIN])
    verdict = expected(rule, tokens, target, draft, reject, final)
    pairwise = np.float32(target[0, 0].reshape(2, -1).sum(axis=0, dtype=np.float32).sum())
    assert pairwise > 1  # so another order of the same sum would move the bound beyond the first column
    assert verdict.predict[0] == 0
    assert same(run(rule, device, tokens, target, draft, reject, final), verdict)


def test_coin_zero_without_mass(device):
    target = np.array([[[0, 1], [0.5, 0.5]]], dtype=np.float32)
    draft = np.array([[[1, 0]]], dtype=np.float32)
    zeros = np.zeros((1, 2), np.float32), np.zeros(1, np.float32)
    tokens = np.array([[1, 0]])
    assert run("classic", device, tokens, target, draft, *zeros).counts.tolist() == [0]
    assert run("target-only", device, tokens, target, draft, *zeros).counts.tolist() == [1]


def test_final_coin_of_one(device):
    target = np.zeros((1, 1, 8), dtype=np.float32)
    target[0, 0, :5] = np.float32(0.2)
    inputs = (np.array([[7]]), target, np.zeros((1, 0, 8), np.float32), np.zeros((1, 1), np.float32))
    for final, classic in ((reference_coins.LARGEST_COIN, 4), (1.0, 7)):
        coin = np.array([final], dtype=np.float32)
        assert run("classic", device, *inputs, coin).predict.tolist() == [classic]
        assert run("target-only", device, *inputs, coin).predict.tolist() == [4]


@pytest.mark.parametrize("rule", ["target-only", "classic"])
def test_hostile_values(generator, device, rule):
    tokens, target, draft, reject, final = batch(generator, 8, 4, 40)
    target[0, 0] = 0
    target[1, :, ::3] = np.nan
    draft[2] = np.nan
    draft[3, :, 1::2] = np.nan
    tokens[4, 1], tokens[5, 2] = -1, 40
    target[6] = np.nan
    reject[:, 3] = np.nan  # the last rejection coin belongs to no step
    inputs = tokens, target, draft, reject, final
    assert same(run(rule, device, *inputs), expected(rule, *inputs))


def test_thresholds(generator, device):
    inputs = batch(generator, 32, 4, 12)
    plain = expected("target-only", *inputs)
    for options in ({"threshold_acc": 0.3}, {"threshold_single": 0.2}, {"threshold_acc": 0.0}):
        verdict = expected("target-only", *inputs, **options)
        assert not np.array_equal(verdict.counts, plain.counts)
        assert same(run("target-only", device, *inputs, **options), verdict)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy(generator, device, dtype):
    logits = torch.from_numpy(generator.normal(size=(16, 4, 1500))).to(dtype)
    logits[0, 0, [7, 1030]] = 50
    logits[1, :, 3] = torch.nan
    logits[2, 2] = -torch.inf
    best = reference.argmax(logits.float().numpy())
    tokens = np.full((16, 4), 3, dtype=np.int64)
    keep = generator.random((16, 3)) < 0.7
    tokens[:, 1:] = np.where(keep, best[:, :-1], 5)
    chosen = torch.empty(16, 4, dtype=torch.int32, device=device)
    row_argmax(logits.to(device).view(64, 1500), chosen.view(64))
    assert chosen[0, 0] == 7
    assert chosen[2, 2] == 0
    assert np.array_equal(chosen.cpu().numpy(), best)
    out = VerifyBuffers.allocate(16, 4, device)
    verify_greedy(put(tokens, device), chosen, out)
    verdict = reference.verify_greedy(tokens, logits.float().numpy())
    assert set(verdict.counts.tolist()) == {0, 1, 2, 3}
    assert same(out, verdict)


def test_greedy_worked_rows(vectors, worked, device):
    tokens = np.array([row["tokens"] for row in vectors["greedy"]])
    chosen = torch.empty(2, 4, dtype=torch.int32, device=device)
    row_argmax(put(np.repeat(worked[0], 2, axis=0), device).view(8, 8), chosen.view(8))
    out = VerifyBuffers.allocate(2, 4, device)
    verify_greedy(put(tokens, device), chosen, out)
    for at, row in enumerate(vectors["greedy"]):
        count = len(row["kept"])
        assert out.predict.view(2, 4)[at, : count + 1].tolist() == [*row["kept"], row["final"]]


@pytest.mark.parametrize("rule", ["target-only", "classic"])
def test_a_request_does_not_see_its_batch(generator, device, rule):
    inputs = batch(generator, 6, 4, 33)
    together = run(rule, device, *inputs)
    order = [4, 1, 1, 5]
    moved = run(rule, device, *(part[order] for part in inputs))
    assert moved.counts.tolist() == together.counts[order].tolist()
    assert moved.predict.view(4, 4).tolist() == together.predict.view(6, 4)[order].tolist()
    poisoned = [part.copy() for part in inputs]
    for part in poisoned[1:]:
        part[5] = np.nan
    assert run(rule, device, *poisoned).predict[:20].tolist() == together.predict[:20].tolist()


def test_empty_batch(device):
    empty = np.zeros((0, 4), np.int64), np.zeros((0, 4, 8), np.float32), np.zeros((0, 3, 8), np.float32)
    for rule in ("target-only", "classic"):
        assert run(rule, device, *empty, np.zeros((0, 4), np.float32), np.zeros(0, np.float32)).counts.shape == (0,)


def test_wrong_arguments_are_named(generator, device):
    tokens, target, draft, reject, final = (put(part, device) for part in batch(generator, 2, 4, 9))
    buffers, out = CoinBuffers(reject, final), VerifyBuffers.allocate(2, 4, device)
    with pytest.raises(ValueError, match="target is not contiguous float32"):
        verify_target_only(tokens, target.double(), buffers, out)
    with pytest.raises(ValueError, match="draft is not contiguous"):
        verify_classic(tokens, target, draft[:, :2], buffers, out)
    with pytest.raises(ValueError, match="draft is not contiguous"):
        verify_classic(tokens, target, target, buffers, out)
    with pytest.raises(ValueError, match="predict is not"):
        verify_classic(tokens, target, draft, buffers, VerifyBuffers.allocate(2, 3, device))
    with pytest.raises(ValueError, match=r"coins\.reject"):
        verify_target_only(tokens, target, CoinBuffers.allocate(2, 5, device), out)
    with pytest.raises(ValueError, match="target_tokens"):
        verify_greedy(tokens, tokens, out)
