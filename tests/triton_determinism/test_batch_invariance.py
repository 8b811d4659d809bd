"""A query row's bits do not depend on its batch: the needle in every composition, and proof that it could show.

Bits of the fp32 lse and of the bf16 output are compared; the needle has keys enough for several splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

import numpy as np
import pytest
import torch
from dsv4_triton import attention, workload
from dsv4_triton.attention import sparse_attention
from dsv4_triton.pool import PackedPool
from dsv4_triton.store import pack_and_store

HEADS, ENTRIES, SCALE = 16, 64, 512**-0.5
MAIN, EXTRA = 128, 700  # keys of the needle in each list; beyond one split of 640
KEYS = 1024


@dataclass(frozen=True)
class Row:
    """One query row: q ``[HEADS, 512]`` and its slots in both lists."""

    q: torch.Tensor
    main: torch.Tensor
    extra: torch.Tensor


class World:
    """Pools with random keys, a needle, and fillers by name."""

    def __init__(self, device):
        self.device = device
        generator = torch.Generator().manual_seed(crc32(b"batch invariance"))
        slots = torch.randperm(KEYS, generator=generator) + ENTRIES
        # One key at a score near 0 and hundreds near -7, whose weights also add up to about 1: then neither the maximum
        # nor the logarithm is large beside what another order of the sum changes, and the lse shows it.
        away = torch.nn.functional.normalize(torch.randn(512, generator=generator), dim=0)
        keys = torch.randn(KEYS, 512, generator=generator)
        keys -= (keys @ away + 7)[:, None] * away
        keys[slots[0] - ENTRIES] = 0
        self.keys = keys.bfloat16()
        self.pool = self.place(torch.arange(KEYS) + ENTRIES)
        q = torch.randn(HEADS, 512, generator=generator) * 0.8
        self.needle = Row((q + 512**0.5 * away).bfloat16(), slots[:MAIN], slots[-EXTRA:])

    def place(self, slots):
        """A pool, NaN where nothing is stored, that holds key i at ``slots[i]``."""
        pool = PackedPool(int(slots.max()) // ENTRIES + 2, ENTRIES, self.device)
        pool.buffer.fill_(0xFF)
        pack_and_store(self.keys.to(self.device), slots.to(self.device), pool)
        return pool

    def filler(self, name, main=3, extra=5):
        generator = torch.Generator().manual_seed(crc32(str(name).encode()))
        slots = torch.randint(ENTRIES, ENTRIES + KEYS, (main + extra,), generator=generator)
        return Row(torch.randn(HEADS, 512, generator=generator).bfloat16(), slots[:main], slots[main:])

    def poisoned(self):
        """A row whose query is NaN and whose slots hold NaN bytes."""
        empty = torch.arange(4)
        return Row(torch.full((HEADS, 512), torch.nan).bfloat16(), empty, empty)

    def run(self, rows, pool=None, widen=0):
        """lse ``[T, HEADS]`` and out ``[T, HEADS, 512]`` of a batch, on the CPU."""
        pool = self.pool if pool is None else pool
        lists = []
        for name in ("main", "extra"):
            slots = [getattr(row, name) for row in rows]
            width = max(len(each) for each in slots) + widen
            table = torch.full((len(rows), width), 7, dtype=torch.int32)  # beyond the length: a slot of NaN bytes
            for at, each in enumerate(slots):
                table[at, : len(each)] = each
            lengths = torch.tensor([len(each) for each in slots], dtype=torch.int32)
            lists += [table.to(self.device), lengths.to(self.device)]
        q = torch.stack([row.q for row in rows]).to(self.device)
        out, lse = sparse_attention(
            q, pool.view(), lists[0], lists[1], None, SCALE,
            extra_cache=pool.view(), extra_indices=lists[2], extra_lengths=lists[3],
        )  # fmt: skip
        return lse.cpu(), out.cpu()


def bits(lse, out, row):
    return lse[row].numpy().view(np.uint32), out[row].view(torch.int16).numpy()


def same(left, right):
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture(scope="module")
def world(device):
    return World(device)


@pytest.fixture(scope="module")
def alone(world):
    return bits(*world.run([world.needle]), 0)


def compose(world, kind):
    """A batch of this kind, and the places of the needle in it."""
    needle, a, b = world.needle, world.filler("a"), world.filler("b", main=1)
    return {
        "first": ([needle, a, b], [0]),
        "middle": ([a, needle, b], [1]),
        "last": ([a, b, needle], [2]),
        "permuted": ([b, needle, a], [1]),
        "twice": ([needle, a, needle], [0, 2]),
        "padded": ([needle, world.filler("pad", 0, 0), world.filler("pad", 0, 0)], [0]),
        "long-neighbour": ([world.filler("long", main=600, extra=900), needle], [1]),
        "short-neighbour": ([world.filler("short", main=1, extra=0), needle], [1]),
        "empty-neighbour": ([world.filler("empty", main=0, extra=0), needle], [1]),
        "nan-neighbour": ([world.poisoned(), needle, world.poisoned()], [1]),
        "other-fillers": ([world.filler("c"), needle, world.filler("d")], [1]),
    }[kind]


KINDS = (
    "first", "middle", "last", "permuted", "twice", "padded", "long-neighbour", "short-neighbour", "empty-neighbour",
    "nan-neighbour", "other-fillers",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_composition(world, alone, kind):
    rows, places = compose(world, kind)
    result = world.run(rows)
    for place in places:
        assert same(bits(*result, place), alone)


def test_poisoned_neighbours_are_poisoned(world):
    """Otherwise the composition above would prove nothing."""
    lse, out = world.run([world.poisoned()])
    assert out.isnan().all()
    assert lse.isnan().any() or torch.isinf(lse).any()


def test_run_to_run(world, alone):
    for _ in range(2):
        assert same(bits(*world.run([world.needle]), 0), alone)


def test_wider_tables(world, alone):
    assert same(bits(*world.run([world.needle], widen=200), 0), alone)


def test_other_physical_pages(world, alone):
    """The same logical keys in other slots: the order of the list decides, not where its keys lie."""
    moved = torch.randperm(KEYS, generator=torch.Generator().manual_seed(1)) + 5 * ENTRIES
    pool = world.place(moved)
    needle = world.needle
    there = Row(needle.q, moved[needle.main - ENTRIES], moved[needle.extra - ENTRIES])
    assert same(bits(*world.run([there], pool=pool), 0), alone)


def test_chunks_of_the_workspace(world, alone, monkeypatch):
    rows, places = compose(world, "middle")
    monkeypatch.setattr(workload, "WORKSPACE_BYTES", 1)
    assert same(bits(*world.run(rows), places[0]), alone)


def test_number_of_rows(world, alone):
    sweep = (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 2047, 2048, 2049)
    for rows in sweep if world.device == "cuda" else (2, 33):
        batch = [world.filler(f"row {at % 8}", main=1, extra=1) for at in range(rows)]
        at = rows // 2
        batch[at] = world.needle
        assert same(bits(*world.run(batch), at), alone)


def test_splits_that_follow_the_batch_are_seen(world, alone, monkeypatch):
    """The defect: other splits in a larger batch. Many heads must show it, else these cases see too little."""
    launch = attention.launch

    def by_batch(q, *arguments):
        monkeypatch.setattr(attention, "SPLIT_KEYS", 640 if q.shape[0] == 1 else 128)
        launch(q, *arguments)

    monkeypatch.setattr(attention, "launch", by_batch)
    assert same(bits(*world.run([world.needle]), 0), alone)
    rows, places = compose(world, "middle")
    lse, out = bits(*world.run(rows), places[0])
    heads = (lse != alone[0]) | (out != alone[1]).any(axis=1)
    assert heads.mean() > 0.25


def test_another_order_of_the_list_is_seen(world, alone):
    """A sparse list is summed in its order, so whoever makes it must make it in one order."""
    needle = world.needle
    turned = Row(needle.q, needle.main.flip(0), needle.extra.flip(0))
    assert not same(bits(*world.run([turned]), 0), alone)


class Spy:
    """The combine kernel, and the fp32 accumulators, maxima and sums that it was handed."""

    def __init__(self, kernel):
        self.kernel, self.seen = kernel, []

    def __getitem__(self, grid):
        def launch(partial, splits, *arguments, **options):
            words = workload.PARTIAL_WORDS
            self.seen.append(partial.view(-1, splits, HEADS, words)[..., : 512 + 2].cpu().clone())
            return self.kernel[grid](partial, splits, *arguments, **options)

        return launch


def accumulators(world, monkeypatch, rows, place):
    """fp32 bits of the needle's own splits."""
    spy = Spy(attention.combine)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "combine", spy)
        world.run(rows)
    own = -(-(-(-MAIN // 64) + -(-EXTRA // 64)) // (attention.SPLIT_KEYS // 64))
    return spy.seen[0][place, :own].numpy().view(np.uint32)


@pytest.mark.parametrize("kind", ["middle", "long-neighbour", "nan-neighbour"])
def test_accumulators_do_not_depend_on_the_batch(world, monkeypatch, kind):
    """Before the bf16 rounding, which hides most of what another order of the sum changes."""
    rows, places = compose(world, kind)
    alone = accumulators(world, monkeypatch, [world.needle], 0)
    assert alone.shape[0] == 2
    for place in places:
        assert np.array_equal(accumulators(world, monkeypatch, rows, place), alone)


def test_accumulators_show_another_order(world, monkeypatch):
    needle = world.needle
    turned = Row(needle.q, needle.main.flip(0), needle.extra.flip(0))
    found = accumulators(world, monkeypatch, [turned], 0)
    alone = accumulators(world, monkeypatch, [needle], 0)
    assert (found != alone).mean() > 0.9
