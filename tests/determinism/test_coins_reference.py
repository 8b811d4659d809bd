"""Hash and coin against known answers, the clamp's boundary counted, and each single mistake caught."""

from __future__ import annotations

import numpy as np
import pytest
from dsv4_reference.coins import LARGEST_COIN, coin, coin_hash, hash_columns, murmur3_32, uniform, verify_coins

BOUNDARY = np.arange(0xFFFFF000, 0x100000000, dtype=np.uint64).astype(np.uint32)


def bits(array):
    return np.asarray(array, dtype=np.float32).view(np.uint32)


def check_vectors(hasher, vectors):
    """How many of the known answers a hash gets wrong."""
    return sum(
        int(hasher([int(v["seed"], 16)], [v["position"]], [v["column"]])[0, 0]) != int(v["hash"], 16)
        for v in vectors["hash"]
    )


def check_boundary(route):
    """Ones before the clamp by a route from uint32 hashes to fp32: 129 is the contract's."""
    return int((route(BOUNDARY) == np.float32(1)).sum())


def test_known_hashes_and_coins(vectors):
    assert check_vectors(hash_columns, vectors) == 0
    for v in vectors["hash"]:
        h = coin_hash(int(v["seed"], 16), v["position"], v["column"])
        assert h == int(v["hash"], 16)
        assert bits(coin([h]))[0] == int(v["coin"], 16)


def test_scalar_and_array_form_agree(loose_hash):
    generator = np.random.default_rng(2024)
    seeds = generator.integers(-(2**63), 2**63, 200)
    positions = generator.integers(0, 2**40, 200)
    columns = generator.integers(0, 2**32, 7)
    table = hash_columns(seeds, positions, columns)
    expected = [[coin_hash(int(s), int(p), int(c)) for c in columns] for s, p in zip(seeds, positions, strict=True)]
    assert table.tolist() == expected
    assert loose_hash()(seeds, positions, columns).tolist() == expected


@pytest.mark.parametrize(
    ("defect", "caught"),
    [
        ({"order": (1, 0, 2, 3)}, 8),
        ({"order": (0, 1, 3, 2)}, 8),
        ({"seed_bits": 32}, 3),
        ({"length": 12}, 12),
        ({"length": 0}, 12),
        ({"rotate_k": 13, "rotate_h": 15}, 12),
        ({"multiplier": 4}, 12),
        ({"shifts": (16, 15, 16)}, 12),
        ({"start": 1}, 12),
        ({"mix1": 0xC2B2AE35, "mix2": 0x85EBCA6B}, 12),
        ({"c1": 0x1B873593, "c2": 0xCC9E2D51}, 11),
        ({"position_shift": 1}, 12),
    ],
)
def test_vectors_catch_a_wrong_hash(vectors, loose_hash, defect, caught):
    assert check_vectors(loose_hash(), vectors) == 0
    assert check_vectors(loose_hash(**defect), vectors) == caught


def test_truncated_seed_is_seen_by_the_pair_that_differs_in_the_high_word(loose_hash):
    low, high = 0, 2**32
    assert coin_hash(low, 0, 0) != coin_hash(high, 0, 0)
    truncating = loose_hash(seed_bits=32)
    assert truncating.one(low, 0, 0) == truncating.one(high, 0, 0)


def test_negative_seeds_are_twos_complement_and_positions_wrap():
    assert coin_hash(-42, 100, 1) == 0x6DFDF8B3 == coin_hash(2**64 - 42, 100, 1)
    assert hash_columns([-42], [100], [1])[0, 0] == 0x6DFDF8B3
    assert hash_columns([7], [5], [2]) == hash_columns([7], [5 + 2**32], [2])
    mixed = hash_columns([2**64 - 1, -1], [0, 0], [0])
    assert mixed[0, 0] == mixed[1, 0]


def test_boundary_counts():
    assert check_boundary(lambda h: uniform(h).astype(np.float32)) == 129
    clamped = coin(BOUNDARY)
    assert int((clamped == LARGEST_COIN).sum()) == 384
    assert bits(LARGEST_COIN) == 0x3F7FFFFF
    assert int((uniform(BOUNDARY).astype(np.float32) == LARGEST_COIN).sum()) == 255
    assert BOUNDARY[clamped == LARGEST_COIN].min() == 0xFFFFFE80
    assert uniform([0xFFFFFF7E]).astype(np.float32)[0] == LARGEST_COIN
    assert uniform([0xFFFFFF7F]).astype(np.float32)[0] == 1
    unclamped = uniform(BOUNDARY).astype(np.float32)
    assert np.array_equal(bits(clamped)[unclamped < 1], bits(unclamped)[unclamped < 1])


@pytest.mark.parametrize(
    "route",
    [
        lambda h: h.astype(np.float32) / np.float32(0xFFFFFFFF),
        lambda h: (h.astype(np.float64) / 2.0**32).astype(np.float32),
        lambda h: ((h.astype(np.float64) + 0.5) / 2.0**32).astype(np.float32),
    ],
    ids=["fp32-before-the-divide", "two-to-the-32", "midpoints"],
)
def test_other_routes_have_another_fingerprint(route):
    assert check_boundary(route) == 128


def test_small_end():
    assert bits(coin([0])) == 0
    assert bits(coin([1])) == 0x2F800000


def test_verify_coins_rows_and_columns(vectors):
    for row in vectors["rows"]:
        reject, final = verify_coins([row["seed"]], [row["length"]], 4)
        expected = coin([int(h, 16) for h in row["hashes"]])
        assert bits(reject[0]).tolist() == bits(expected[:4]).tolist()
        assert bits(final).tolist() == bits(expected[4:]).tolist()


def structured(seeds, positions, columns):
    return (1000 * np.asarray(seeds)[:, None] + np.asarray(columns)[None, :]).astype(np.uint32)


def split(reject, final, drafts):
    """Whether a split puts columns 0 .. D - 1 and D where the contract wants them, both contiguous fp32."""
    bs = len(final)
    expected = coin(structured(np.arange(bs), np.zeros(bs), np.arange(drafts + 1)))
    return (
        np.array_equal(bits(reject), bits(expected[:, :drafts]))
        and np.array_equal(bits(final), bits(expected[:, drafts]))
        and reject.flags.c_contiguous
        and final.flags.c_contiguous
        and reject.dtype == final.dtype == np.float32
    )


@pytest.mark.parametrize("drafts", [1, 4, 5])
def test_split_of_columns(drafts):
    assert split(*verify_coins(np.arange(6), np.zeros(6, dtype=np.int64), drafts, hasher=structured), drafts)
    table = coin(structured(np.arange(6), np.zeros(6), np.arange(drafts + 1)))
    assert not split(table[:, :drafts], np.ascontiguousarray(table[:, drafts]), drafts)
    wrong_final = np.ascontiguousarray(table[:, drafts - 1])
    assert not split(np.ascontiguousarray(table[:, :drafts]), wrong_final, drafts)
    assert not split(np.ascontiguousarray(table[:, 1:]), np.ascontiguousarray(table[:, 0]), drafts)


@pytest.mark.parametrize("bs", [1, 2, 17, 64])
def test_a_row_has_the_same_coins_in_every_batch(bs):
    seeds = np.arange(bs) * 977 - 5
    lengths = np.arange(bs) * 31 + 3
    at = bs // 2
    seeds[at], lengths[at] = 12345, 7
    reject, final = verify_coins(seeds, lengths, 4)
    alone = verify_coins([12345], [7], 4)
    assert np.array_equal(bits(reject[at]), bits(alone[0][0]))
    assert bits(final[at]) == bits(alone[1][0])


def test_wrong_input_is_refused():
    with pytest.raises(ValueError, match="unpad"):
        hash_columns([1, 2], [1, 2, 3], [0])
    with pytest.raises(TypeError, match="integer"):
        hash_columns([1.5], [1], [0])
    with pytest.raises(TypeError, match="integers"):
        hash_columns(np.array([1.5]), [1], [0])
    with pytest.raises(ValueError, match="draft_token_num"):
        verify_coins([1], [1], 0)
    with pytest.raises(ValueError, match="blocks"):
        murmur3_32(b"abc")
