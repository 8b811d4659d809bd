"""The coin kernel, its torch twin and the reference agree bit for bit; each wrong wiring is caught."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from dsv4_reference import coins as reference
from dsv4_triton import coins
from dsv4_triton.coins import (
    CoinBuffers,
    batch_seeds,
    coin_twin,
    draw_coins,
    launch_coins,
    murmur_hash,
    murmur_hash_twin,
)

BOUNDARY = np.arange(0xFFFFF000, 0x100000000, dtype=np.uint64).astype(np.uint32)


def ints(values, device):
    return torch.tensor(np.asarray(values, dtype=np.int64), device=device)


def signed(seed):
    return (seed + 2**63) % 2**64 - 2**63


def bits(tensor):
    return tensor.cpu().numpy().view(np.uint32)


def drawn(seeds, lengths, drafts, device, **launch):
    out = CoinBuffers.allocate(len(seeds), drafts, device)
    if launch:
        launch_coins(ints(seeds, device), ints(lengths, device), out, **launch)
    else:
        draw_coins(ints(seeds, device), ints(lengths, device), out)
    return out


def wrong_vectors(hasher, vectors, device):
    """Known answers that a (seeds, positions, columns) -> uint32 tensor function gets wrong."""
    seeds = ints([signed(int(v["seed"], 16)) for v in vectors["hash"]], device)
    positions = ints([v["position"] for v in vectors["hash"]], device)
    columns = ints([v["column"] for v in vectors["hash"]], device)
    got = hasher(seeds, positions, columns).cpu().numpy().diagonal()
    return int((got != [int(v["hash"], 16) for v in vectors["hash"]]).sum())


@triton.jit
def swapped_words(seed, position, column):
    return coins.murmur3((seed << 32) | (seed >> 32), position, column)


@triton.jit
def truncated_seed(seed, position, column):
    return coins.murmur3(seed & 0xFFFFFFFF, position, column)


@triton.jit
def next_position(seed, position, column):
    return coins.murmur3(seed, position + 1, column)


@triton.jit
def shifted_column(seed, position, column):
    return coins.murmur3(seed, position, column + 1)


@triton.jit
def structured(seed, position, column):
    return (seed & 0xFFFFFFFF).to(tl.uint32) * 1000 + column


@triton.jit
def all_ones(seed, position, column):
    return (column | 0xFFFFFFFF) | position


@triton.jit
def counting(seed, position, column):
    return position + column


@triton.jit
def scattered(seed, position, column):
    return column * 2654435761


@triton.jit
def unclamped(h):
    return coins.uniform(h).to(tl.float32)


@triton.jit
def fp32_before_the_divide(h):
    return h.to(tl.float32) / 4294967295.0


def test_known_hashes(vectors, device):
    assert wrong_vectors(murmur_hash, vectors, device) == 0
    assert wrong_vectors(murmur_hash_twin, vectors, device) == 0
    assert wrong_vectors(lambda s, p, c: murmur_hash_twin(s << 32 | s >> 32 & 0xFFFFFFFF, p, c), vectors, device) == 8


def test_known_rows(vectors, device):
    rows = vectors["rows"]
    out = drawn([r["seed"] for r in rows], [r["length"] for r in rows], 4, device)
    expected = reference.coin(np.array([[int(h, 16) for h in r["hashes"]] for r in rows], dtype=np.uint32))
    assert np.array_equal(bits(out.reject), expected[:, :4].view(np.uint32))
    assert np.array_equal(bits(out.final), np.ascontiguousarray(expected[:, 4]).view(np.uint32))


def test_random_inputs_kernel_twin_and_reference(generator, device):
    seeds = generator.integers(-(2**63), 2**63, 100)
    positions = generator.integers(0, 2**40, 100)
    columns = generator.integers(0, 2**32, 1030)
    kernel = murmur_hash(ints(seeds, device), ints(positions, device), ints(columns, device))
    twin = murmur_hash_twin(ints(seeds, "cpu"), ints(positions, "cpu"), ints(columns, "cpu"))
    expected = reference.hash_columns(seeds, positions, columns)
    assert kernel.dtype == twin.dtype == torch.uint32
    assert np.array_equal(kernel.cpu().numpy(), expected)
    assert np.array_equal(twin.numpy(), expected)


@pytest.mark.parametrize("drafts", [1, 4, 5, 8])
def test_drawn_coins_equal_the_reference(generator, device, drafts):
    seeds, lengths = generator.integers(-(2**63), 2**63, 33), generator.integers(0, 2**33, 33)
    out = drawn(seeds, lengths, drafts, device)
    reject, final = reference.verify_coins(seeds, lengths, drafts)
    assert np.array_equal(bits(out.reject), reject.view(np.uint32))
    assert np.array_equal(bits(out.final), final.view(np.uint32))


def test_more_columns_than_a_block(device):
    out = drawn([5, -6], [7, 8], 1500, device)
    reject, final = reference.verify_coins([5, -6], [7, 8], 1500)
    assert np.array_equal(bits(out.reject), reject.view(np.uint32))
    assert np.array_equal(bits(out.final), final.view(np.uint32))


@pytest.mark.parametrize("defect", [swapped_words, truncated_seed, next_position, shifted_column])
def test_a_wrong_hash_changes_the_coins(vectors, device, defect):
    rows = [*vectors["rows"], {"seed": 2**32 + 3, "length": 1}]
    seeds, lengths = [r["seed"] for r in rows], [r["length"] for r in rows]
    good, bad = drawn(seeds, lengths, 4, device), drawn(seeds, lengths, 4, device, hasher=defect)
    assert not np.array_equal(bits(good.reject), bits(bad.reject))
    assert not np.array_equal(bits(good.final), bits(bad.final))


def scan(device, **launch):
    """Coins of all hashes of the boundary, through the kernel: position plus column is the hash."""
    out = drawn([0], BOUNDARY[:1], len(BOUNDARY), device, hasher=counting, **launch)
    return out.reject[0].cpu().numpy()


def test_boundary_scan(device):
    clamped, raw = scan(device), scan(device, to_coin=unclamped)
    assert (raw == 1).sum() == 129
    assert (clamped == reference.LARGEST_COIN).sum() == 384
    assert np.array_equal(clamped.view(np.uint32), reference.coin(BOUNDARY).view(np.uint32))
    assert (scan(device, to_coin=fp32_before_the_divide) == 1).sum() == 128
    twin = coin_twin(torch.from_numpy(BOUNDARY.astype(np.int64)))
    assert np.array_equal(bits(twin), clamped.view(np.uint32))


def test_a_hash_gives_the_same_coin_everywhere(device):
    """Hashes all over the range: the fp64 division is not, but the coin is, free of the device's rounding."""
    count = 1_000_000 if device == "cuda" else 100_000
    out = drawn([0], [0], count, device, hasher=scattered)
    hashes = np.arange(count, dtype=np.uint32) * np.uint32(2654435761)
    expected = reference.coin(hashes).view(np.uint32)
    assert np.array_equal(bits(out.reject)[0], expected)
    assert np.array_equal(bits(coin_twin(torch.from_numpy(hashes.astype(np.int64)))), expected)


def test_no_clamp_lets_one_through(device):
    assert (drawn([1], [1], 4, device, hasher=all_ones).reject.cpu().numpy() == reference.LARGEST_COIN).all()
    assert (drawn([1], [1], 4, device, hasher=all_ones, to_coin=unclamped).final.cpu().numpy() == 1).all()


def test_columns_are_split_as_the_contract_says(device):
    out = drawn(np.arange(6), np.zeros(6), 4, device, hasher=structured)
    table = reference.coin(1000 * np.arange(6, dtype=np.uint32)[:, None] + np.arange(5, dtype=np.uint32))
    assert np.array_equal(bits(out.reject), table[:, :4].view(np.uint32))
    assert np.array_equal(bits(out.final), np.ascontiguousarray(table[:, 4]).view(np.uint32))
    assert out.reject.is_contiguous()
    assert out.final.is_contiguous()
    shifted = drawn(np.arange(6), np.zeros(6), 4, device, hasher=shifted_column)
    assert not np.array_equal(bits(out.final), bits(shifted.final))


@pytest.mark.parametrize("bs", [1, 2, 17, 64])
def test_a_row_does_not_see_its_batch(device, bs):
    seeds, lengths = np.arange(bs) * 977 - 5, np.arange(bs) * 31 + 3
    at = bs // 2
    seeds[at], lengths[at] = -12345, 2**35 + 7
    together, alone = drawn(seeds, lengths, 4, device), drawn([-12345], [2**35 + 7], 4, device)
    assert np.array_equal(bits(together.reject)[at], bits(alone.reject)[0])
    assert bits(together.final)[at] == bits(alone.final)[0]


def test_pad_rows_leave_real_rows_alone(device):
    buffers = CoinBuffers.allocate(8, 4, device)
    seeds, lengths = ints([3, -4, 5, 0, 0, 0, 0, 0], device), ints([9, 8, 7, 1, 1, 1, 1, 1], device)
    draw_coins(seeds, lengths, buffers)
    alone = drawn([3, -4, 5], [9, 8, 7], 4, device)
    assert np.array_equal(bits(buffers.reject)[:3], bits(alone.reject))
    buffers.reject.fill_(-1)
    draw_coins(seeds[:3].contiguous(), lengths[:3].contiguous(), buffers.rows(3))
    assert np.array_equal(bits(buffers.reject)[:3], bits(alone.reject))
    assert (buffers.reject[3:] == -1).all()


def test_empty_batch(device):
    assert drawn([], [], 4, device).final.shape == (0,)
    assert murmur_hash(ints([], device), ints([], device), ints([1], device)).shape == (0, 1)


def test_unseeded_batch_never_hashes(device, monkeypatch):
    def never(*_, **__):
        raise AssertionError("hashed an unseeded batch")

    for name in ("launch_coins", "murmur_hash", "murmur_hash_twin"):
        monkeypatch.setattr(coins, name, never)
    torch.manual_seed(1)
    first, second = CoinBuffers.allocate(3, 4, device), CoinBuffers.allocate(3, 4, device)
    draw_coins(None, ints([1, 2, 3], device), first)
    draw_coins(None, ints([1, 2, 3], device), second)
    assert not torch.equal(first.reject, second.reject)
    assert not torch.equal(first.final, second.final)
    assert first.reject.shape == (3, 4)
    assert first.reject.dtype == torch.float32
    assert ((first.reject >= 0) & (first.reject < 1)).all()


def test_seeded_batch_ignores_the_global_generator(device):
    torch.manual_seed(1)
    first = drawn([1, 2], [3, 4], 4, device)
    state = torch.get_rng_state()
    second = drawn([1, 2], [3, 4], 4, device)
    assert np.array_equal(bits(first.reject), bits(second.reject))
    assert torch.equal(state, torch.get_rng_state())

    def with_rand(out):
        torch.rand(2, 4, out=out.reject)
        return bits(out.reject).copy()

    out = CoinBuffers.allocate(2, 4, "cpu")
    assert not np.array_equal(with_rand(out), with_rand(out))


def test_cpu_tensors_use_the_twin_where_kernels_are_compiled(monkeypatch):
    monkeypatch.setattr(coins, "runs_kernels", lambda _: False)
    out = drawn([12345], [7], 4, "cpu")
    reject, final = reference.verify_coins([12345], [7], 4)
    assert np.array_equal(bits(out.reject), reject.view(np.uint32))
    assert np.array_equal(bits(out.final), final.view(np.uint32))


def test_seeds_of_a_batch():
    assert batch_seeds([None, None], "cpu") is None
    assert batch_seeds([], "cpu") is None
    assert batch_seeds([1, -1, 2**64 - 1], "cpu").tolist() == [1, -1, -1]
    with pytest.raises(ValueError, match=r"without a seed: rows \[1\]"):
        batch_seeds([1, None, 0], "cpu")


def test_wrong_buffers_and_inputs_are_refused(device):
    matrix = torch.zeros(3, 5, device=device)
    with pytest.raises(ValueError, match=r"reject must be contiguous float32.*\.contiguous\(\)"):
        CoinBuffers(matrix[:, :4], torch.zeros(3, device=device))
    with pytest.raises(ValueError, match="final must be contiguous"):
        CoinBuffers(torch.zeros(3, 4, device=device), matrix[:, 4])
    with pytest.raises(ValueError, match="float32"):
        CoinBuffers(torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3))
    out = CoinBuffers.allocate(3, 4, device)
    with pytest.raises(ValueError, match="64 bits"):
        draw_coins(ints([1, 2, 3], device).int(), ints([1, 2, 3], device), out)
    with pytest.raises(ValueError, match="unpad"):
        draw_coins(ints([1, 2, 3], device), ints([1, 2, 3, 4], device), out)
    with pytest.raises(ValueError, match="buffers of 3 requests"):
        draw_coins(ints([1, 2], device), ints([1, 2], device), out)
    with pytest.raises(ValueError, match="contiguous"):
        draw_coins(ints([1, 0, 2, 0, 3, 0], device)[::2], ints([1, 2, 3], device), out)
