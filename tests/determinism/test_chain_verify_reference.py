"""The three rules against worked answers and against the distributions that they promise; each defect is caught."""

from __future__ import annotations

import numpy as np
import pytest
from dsv4_reference.chain_verify import argmax, verify_classic, verify_greedy, verify_target_only
from dsv4_reference.coins import coin, hash_columns, verify_coins
from dsv4_reference.seeded_sample import seeded_sample

ONE = np.float32(1)
BELOW_ONE = np.float32(1 - 2**-24)


@pytest.fixture(scope="module")
def worked(vectors):
    target = np.array(vectors["target_16ths"], dtype=np.float32)[None] / np.float32(16)
    draft = np.array(vectors["draft_16ths"], dtype=np.float32)[None] / np.float32(16)
    return target, draft


def outcome(verdict):
    """Accepted drafts and the final token of a batch of one."""
    count = int(verdict.counts[0])
    assert verdict.accept_index[0].tolist() == [*range(count + 1), *[-1] * (verdict.accept_index.shape[1] - count - 1)]
    assert (verdict.predict[count + 1 :] == -1).all()
    return verdict.predict[:count].tolist(), int(verdict.predict[count])


def run(rule, worked, tokens, reject, final):
    target, draft = worked
    tokens = np.array([tokens])
    if rule == "classic":
        return outcome(verify_classic(tokens, target, draft, reject, final))
    return outcome(verify_target_only(tokens, target, reject, final))


def wrong_rows(vectors, worked, coins):
    """How many worked rows come out differently when the coins come from ``coins(seed, length)``."""
    return sum(
        run(row["rule"], worked, row["tokens"], *coins(row["seed"], row["length"])) != (row["kept"], row["final"])
        for row in vectors["chains"]
    )


def test_worked_rows(vectors, worked):
    assert wrong_rows(vectors, worked, lambda seed, length: verify_coins([seed], [length], 4)) == 0


def test_worked_rows_as_one_batch(vectors, worked):
    target, draft = worked
    for rule in ("target-only", "classic"):
        rows = [row for row in vectors["chains"] if row["rule"] == rule]
        tokens = np.array([row["tokens"] for row in rows])
        coins = verify_coins([row["seed"] for row in rows], [row["length"] for row in rows], 4)
        many = np.repeat(target, len(rows), axis=0)
        if rule == "classic":
            verdict = verify_classic(tokens, many, np.repeat(draft, len(rows), axis=0), *coins)
        else:
            verdict = verify_target_only(tokens, many, *coins)
        assert verdict.counts.tolist() == [len(row["kept"]) for row in rows]
        finals = verdict.predict.reshape(-1, 4)[np.arange(len(rows)), verdict.counts]
        assert finals.tolist() == [row["final"] for row in rows]
        first = verdict.accept_index[:, 0]
        assert first.tolist() == [4 * b for b in range(len(rows))]


@pytest.mark.parametrize(
    "defect",
    [
        lambda seed, length: verify_coins([seed], [length + 1], 4),
        lambda seed, length: (lambda r, f: (r, r[:, 0]))(*verify_coins([seed], [length], 4)),
        lambda seed, length: (lambda r, f: (r, r[:, 3]))(*verify_coins([seed], [length], 4)),
        lambda seed, length: (lambda r, f: (np.roll(r, -1, axis=1), f))(*verify_coins([seed], [length], 4)),
        lambda seed, length: verify_coins([seed], [length], 5),
    ],
    ids=["length-plus-one", "final-from-column-0", "final-from-column-d-1", "columns-shifted", "another-d"],
)
def test_worked_rows_catch_wrong_coins(vectors, worked, defect):
    def coins(seed, length):
        reject, final = defect(seed, length)
        return reject[:, :4], final

    assert wrong_rows(vectors, worked, coins) > 0


def test_greedy_worked_rows(vectors, worked):
    target, _ = worked
    for row in vectors["greedy"]:
        assert outcome(verify_greedy(np.array([row["tokens"]]), target)) == (row["kept"], row["final"])


def test_greedy_ties_go_to_the_lowest_index_and_nan_never_wins():
    rows = np.array([[1, 3, 3, 2], [np.nan, 1, 1, 0], [np.nan] * 4, [-np.inf] * 4])
    assert argmax(rows).tolist() == [1, 1, 0, 0]
    tokens = np.array([[9, 1, 2]])
    target = np.array([[[0.0, 5.0, 5.0], [0.0, 1.0, 1.0], [2.0, 2.0, 2.0]]])
    assert outcome(verify_greedy(tokens, target)) == ([1], 1)


def test_last_rejection_coin_is_never_read(vectors, worked):
    for row in vectors["chains"]:
        reject, final = verify_coins([row["seed"]], [row["length"]], 4)
        reject[:, 3] = np.nan
        assert run(row["rule"], worked, row["tokens"], reject, final) == (row["kept"], row["final"])


def test_an_all_ones_hash_returns_no_forbidden_token_thanks_to_the_clamp(worked):
    target = np.zeros((1, 1, 8), dtype=np.float32)
    target[0, 0, :5] = np.float32(0.2)
    tokens, draft, reject = np.array([[7]]), np.zeros((1, 0, 8), dtype=np.float32), np.zeros((1, 1), dtype=np.float32)
    clamped = coin([0xFFFFFFFF])
    assert clamped[0] == BELOW_ONE
    assert outcome(verify_classic(tokens, target, draft, reject, clamped)) == ([], 4)
    assert outcome(verify_classic(tokens, target, draft, reject, np.array([ONE]))) == ([], 7)  # no clamp: mass 0
    assert outcome(verify_target_only(tokens, target, reject, np.array([ONE]))) == ([], 4)


def test_coin_zero_and_a_token_without_mass():
    target = np.array([[[0, 1], [0.5, 0.5]]], dtype=np.float32)
    draft = np.array([[[1, 0]]], dtype=np.float32)
    tokens, reject, final = np.array([[1, 0]]), np.zeros((1, 2), np.float32), np.zeros(1, np.float32)
    assert outcome(verify_classic(tokens, target, draft, reject, final)) == ([], 1)
    # documented behaviour of the target-only rule: "<=" keeps the token
    assert outcome(verify_target_only(tokens, target, reject, final)) == ([0], 0)


def test_thresholds():
    target = np.array([[[0.5, 0.25, 0.25], [1, 0, 0]]], dtype=np.float32)
    tokens, final = np.array([[0, 1]]), np.zeros(1, np.float32)
    reject = np.full((1, 2), 0.3, np.float32)
    assert outcome(verify_target_only(tokens, target, reject, final))[0] == []
    assert outcome(verify_target_only(tokens, target, reject, final, threshold_acc=0.5))[0] == [1]
    assert outcome(verify_target_only(tokens, target, reject, final, threshold_single=0.25))[0] == [1]
    assert outcome(verify_target_only(tokens, target, reject, final, threshold_acc=0.0))[0] == [1]


def test_nothing_left_to_draw_from():
    target = np.array([[[0, 1, 0, 0], [0, 0, 1, 0]]], dtype=np.float32)
    draft = np.array([[[0, 1, 0, 0]]], dtype=np.float32)
    reject, final = np.full((1, 2), BELOW_ONE), np.full(1, BELOW_ONE)
    kept = verify_classic(np.array([[0, 1]]), target, draft, reject, final)
    assert outcome(kept) == ([1], 2)
    empty = verify_classic(np.array([[0, 2]]), target, draft, reject, final)
    assert outcome(empty) == ([], 3)
    nothing = np.zeros_like(target)
    assert outcome(verify_target_only(np.array([[0, 2]]), nothing, reject, final)) == ([], 3)


def test_nan_and_foreign_tokens_count_as_no_mass():
    target = np.array([[[np.nan, 0.5, 0.5], [0.25, 0.75, np.nan]]], dtype=np.float32)
    draft = np.array([[[np.nan, np.nan, 0.25]]], dtype=np.float32)
    reject, final = np.full((1, 2), 0.9, np.float32), np.full(1, 0.1, np.float32)
    # q is NaN, so 0, and 0.9 * 0 < 0.5 keeps token 1
    assert outcome(verify_classic(np.array([[0, 1]]), target, draft, reject, final)) == ([1], 0)
    assert outcome(verify_classic(np.array([[0, 0]]), target, draft, reject, final)) == ([], 1)
    for token in (-1, 3):
        assert outcome(verify_classic(np.array([[0, token]]), target, draft, reject, final)) == ([], 1)
        assert outcome(verify_target_only(np.array([[0, token]]), target, reject, final)) == ([], 1)


def chi_square(tokens, expected):
    """Statistic of observed tokens against probabilities; infinite if a token without mass was emitted."""
    observed = np.bincount(tokens, minlength=len(expected)).astype(np.float64)
    if observed[expected == 0].any():
        return np.inf
    mean = expected[expected > 0] * len(tokens)
    return float(((observed[expected > 0] - mean) ** 2 / mean).sum())


ROWS = 40_000
#: 0.1 % of honest runs lie above this, 4 degrees of freedom; the seeds are fixed, so this is no gamble
LIMIT = 18.47


def first_tokens(rule, worked, coins, seed=0):
    """First emitted token of many requests; drafts of the classic rule come from Q by a generator of their own."""
    target, draft = worked
    generator = np.random.default_rng(seed)
    tokens = np.tile(np.array([7, 0, 2, 4]), (ROWS, 1))
    many = np.broadcast_to(target, (ROWS, *target.shape[1:]))
    if rule == "classic":
        tokens[:, 1] = generator.choice(8, ROWS, p=draft[0, 0].astype(np.float64))
        verdict = verify_classic(tokens, many, np.broadcast_to(draft, (ROWS, *draft.shape[1:])), *coins)
    else:
        verdict = verify_target_only(tokens, many, *coins)
    return verdict.predict.reshape(ROWS, -1)[:, 0]


@pytest.mark.parametrize("rule", ["target-only", "classic"])
def test_first_token_has_the_target_distribution(rule, worked):
    expected = worked[0][0, 0].astype(np.float64)
    seeds, lengths = np.arange(ROWS), np.full(ROWS, 100)
    coins = verify_coins(seeds, lengths, 4)
    assert chi_square(first_tokens(rule, worked, coins), expected) < LIMIT
    reject, _ = coins
    same_coin_twice = (reject, np.ascontiguousarray(reject[:, 0]))
    assert chi_square(first_tokens(rule, worked, same_coin_twice), expected) > 10 * LIMIT


def test_coins_are_uniform_over_seeds_lengths_and_columns():
    everywhere = np.full(64, 1 / 64)
    for hashes in (
        hash_columns(np.arange(ROWS), np.zeros(ROWS, np.int64), [0])[:, 0],
        hash_columns(np.zeros(ROWS, np.int64), np.arange(ROWS), [0])[:, 0],
        hash_columns([99], [5], np.arange(ROWS))[0],
    ):
        buckets = (coin(hashes) * 64).astype(np.int64)
        assert chi_square(buckets, everywhere) < 103.4  # 0.1 %, 63 degrees of freedom


def test_only_greedy_speculation_equals_plain_decoding(vectors, worked):
    """At a temperature both are draws of one distribution from coins of their own: equal tokens are not promised."""
    target, _ = worked
    seeds, drafts = np.arange(200), np.array([[7, 2, 3, 3]])
    with np.errstate(divide="ignore"):
        plain = seeded_sample(np.repeat(np.log(target[:, 0]), len(seeds), axis=0), seeds, np.full(len(seeds), 7))
    many = np.repeat(target, len(seeds), axis=0)
    tokens = np.repeat(drafts, len(seeds), axis=0)
    verdict = verify_target_only(tokens, many, *verify_coins(seeds, np.full(len(seeds), 7), 4))
    assert (verdict.predict.reshape(len(seeds), -1)[:, 0] != plain).any()
    first = verify_greedy(drafts, target).predict[0]
    assert first == argmax(target[0])[0]
