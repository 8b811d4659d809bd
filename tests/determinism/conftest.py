"""Known answers, and a hash whose steps can be got wrong one at a time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class LooseHash:
    """MurmurHash3 written a third time, each constant and step a field, so that a test can change one of them."""

    start: int = 0
    c1: int = 0xCC9E2D51
    c2: int = 0x1B873593
    rotate_k: int = 15
    rotate_h: int = 13
    multiplier: int = 5
    length: int = 16
    shifts: tuple[int, int, int] = (16, 13, 16)
    mix1: int = 0x85EBCA6B
    mix2: int = 0xC2B2AE35
    order: tuple[int, int, int, int] = (0, 1, 2, 3)
    seed_bits: int = 64
    position_shift: int = 0

    def one(self, seed, position, column):
        seed %= 2**self.seed_bits
        position += self.position_shift
        words = (seed & MASK, seed >> 32, position & MASK, column & MASK)
        h = self.start
        for k in (words[at] for at in self.order):
            k = rotate(k * self.c1 & MASK, self.rotate_k) * self.c2 & MASK
            h = (rotate(h ^ k, self.rotate_h) * self.multiplier + 0xE6546B64) & MASK
        first, second, third = self.shifts
        h ^= self.length
        h = (h ^ h >> first) * self.mix1 & MASK
        h = (h ^ h >> second) * self.mix2 & MASK
        return h ^ h >> third

    def __call__(self, seeds, positions, columns):
        rows = [[self.one(int(s), int(p), int(c)) for c in columns] for s, p in zip(seeds, positions, strict=True)]
        return np.array(rows, dtype=np.uint32).reshape(len(seeds), len(columns))


def rotate(x, by):
    return (x << by | x >> 32 - by) & MASK


@pytest.fixture(scope="session")
def vectors():
    return json.loads((Path(__file__).parent / "vectors.json").read_text())


@pytest.fixture(scope="session")
def loose_hash():
    return LooseHash
