"""The order of loads in the store's machine code, which no result shows: a few thousand rows are made of latencies."""

from __future__ import annotations

import pytest
import triton


@pytest.fixture(scope="module")
def code(machine_code) -> dict[str, list[str]]:
    """Machine code of the store that expects all rows to write, and of the one that expects few to."""
    return machine_code("sm90", "store_mapped", "store")


def loads(code: list[str]) -> list[str]:
    """Loads from memory and barriers, in order."""
    return [name for name in code if name.startswith(("LDG", "BAR"))]


def test_values_are_asked_for_before_their_slots(code):
    """Four 16-byte pieces and the rope, then a barrier, then locations and slot map."""
    before = loads(code["store_mapped"])
    values = before[: next(at for at, name in enumerate(before) if name.startswith("BAR"))]
    assert sum(name.startswith("LDG.E.128") for name in values) == 4
    assert len(values) == 5
    assert not any(name.startswith("LDG.E.128") for name in before[5:])


def test_values_of_rows_that_write_nothing_wait_for_their_slots(code):
    """The other order, so that the first is seen to be told apart."""
    assert loads(code["store"])[0].startswith("LDG.E.64")


@pytest.mark.skipif(not triton.__version__.startswith("3.7."), reason="counts are of the pinned toolchain")
def test_nothing_is_taken_apart_one_by_one(code):
    """Twice as many, and a call for each division by the page size, cost more time than memory does."""
    for name, instructions in code.items():
        assert len(instructions) <= 420, name
        assert not any(one.startswith("CALL") for one in instructions)
