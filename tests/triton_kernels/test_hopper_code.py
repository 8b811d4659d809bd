"""Where the Hopper kernel's machine code loads keys, which no result shows: early, or its role waits for them.

The assembler moves loads down to the next barrier if nothing holds them (``layouts.here``): 14 in a row, and
8 % more time for a full device (docs/performance.md).
"""

from __future__ import annotations

import itertools

import pytest

KEYS, STORES = "LDG.E.LTC256B.128", "STS.128"


def runs(code: list[str]) -> list[int]:
    """How many loads of keys follow each other between stores of decoded ones."""
    marks = [name.startswith(KEYS) for name in code if name.startswith((KEYS, STORES))]
    return [len(list(run)) for loading, run in itertools.groupby(marks) if loading]


@pytest.mark.parametrize("kernel", ["hopper", "hopper_split"])
def test_keys_are_asked_for_as_registers_become_free(machine_code, kernel):
    first, *others = runs(machine_code("sm90", kernel)[kernel])
    assert first == 14, "seven groups before the first block"
    assert sum(others) == 2 * 18, "nine groups a block, in the loop for one factor and in that for two"
    assert max(others) <= 4


def test_runs_are_counted():
    assert runs(["STS.128", KEYS, "IADD3", KEYS + ".STRONG.GPU", "STS.128", "STS.128", KEYS]) == [2, 1]
