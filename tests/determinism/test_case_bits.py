"""A case's answers as digests: keyed by logical row, blind to nothing in a row, equal wherever the row stands."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from dsv4_matrix.cases.scenario import Observation
from dsv4_matrix.gate import RowStore
from dsv4_matrix.gate.rows import describe
from dsv4_matrix.judge.case_bits import case_bits, row_keys
from dsv4_matrix.report.bits import Level
from dsv4_matrix.report.digest import DigestError


def answer(order=(0, 1, 2)):
    """A scenario of one step with three rows of two requests, and its observation, rows in this order."""
    generator = torch.Generator().manual_seed(9)
    out = torch.randn(3, 2, 8, generator=generator).bfloat16()
    lse = torch.randn(3, 2, generator=generator)
    order = list(order)
    step = SimpleNamespace(request=torch.tensor([0, 0, 1])[order], positions=torch.tensor([4, 5, 9])[order])
    return SimpleNamespace(steps=(step,)), Observation("eager", 0, out[order], lse[order])


def bits(scenario, *observations, **more):
    return case_bits(scenario, observations, Level.BATCH, **more)


def test_rows_are_named_by_request_and_position():
    scenario, seen = answer()
    assert row_keys(scenario.steps[0]) == ("r0/p4", "r0/p5", "r1/p9")
    found = bits(scenario, seen)
    assert found.promise is Level.BATCH
    assert set(found.digests) == {
        (tensor, f"step 0/eager/{row}") for tensor in ("out", "lse") for row in ("r0/p4", "r0/p5", "r1/p9")
    }


def test_a_row_that_moved_keeps_its_digest():
    assert bits(*answer()) == bits(*answer((2, 0, 1)))


@pytest.mark.parametrize("tensor", ["out", "lse"])
def test_one_bit_changes_one_row(tensor):
    scenario, seen = answer()
    before = bits(scenario, seen)
    flat = getattr(seen, tensor)[1].reshape(-1)
    flat.view(torch.int16)[-1] ^= 1
    after = bits(scenario, seen)
    changed = {key for key in before.digests if before.digests[key] != after.digests[key]}
    assert changed == {(tensor, "step 0/eager/r0/p5")}


def test_legs_do_not_overwrite_each_other():
    scenario, seen = answer()
    again = Observation("replay 1", 0, seen.out + 1, seen.lse)
    assert len(bits(scenario, seen, again).digests) == 12


def test_a_composition_names_its_rows_itself():
    scenario, seen = answer()
    found = bits(scenario, seen, keys=lambda step: ["needle", "filler 1", "filler 2"])
    assert ("lse", "step 0/eager/needle") in found.digests
    with pytest.raises(DigestError, match="twice"):
        bits(scenario, seen, keys=lambda step: ["needle", "needle", "x"])
    with pytest.raises(DigestError, match="one a row"):
        bits(scenario, seen, keys=lambda step: ["needle"])


def test_raw_bits_are_kept_for_messages(tmp_path):
    stores = [RowStore(tmp_path / name) for name in "ab"]
    scenario, seen = answer()
    bits(scenario, seen, keep=partial(stores[0].put, "case"))
    seen.lse[2, 1] += 1
    bits(scenario, seen, keep=partial(stores[1].put, "case"))
    assert describe(*stores, "case", "lse", "step 0/eager/r1/p9").startswith("column 1: 0x")
    assert describe(*stores, "case", "out", "step 0/eager/r1/p9") == ""
