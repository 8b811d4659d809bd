"""Backends are told to put keys past their lists' lengths wherever a case runs, and not where bits of production do."""

from __future__ import annotations

import pytest

from dsv4_matrix.cases.build import build_scenario
from dsv4_matrix.cases.compose import compose
from dsv4_matrix.cases.turns import ALONE
from dsv4_matrix.modes.beyond_lengths import BeyondLengths
from dsv4_matrix.modes.composed import drive_composition
from dsv4_matrix.modes.drive import drive


@pytest.fixture
def telling(toy):
    """A backend that counts how often it was told, and each that was built."""
    built = []

    class Telling(toy.ToyBackend):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            self.told = 0
            built.append(self)

        def put_keys_beyond_lengths(self):
            self.told += 1

    Telling.built = built
    return Telling


@pytest.mark.parametrize(
    "case_id",
    [
        "r0-eager-decode-within-window",
        "r0-eager-extend-within-window",
        "r0-cg-decode-within-window",
        "r0-verify-cg-chain-3",
        "r0-eagle-draft-runner-chain-3-steps",
    ],
)
@pytest.mark.parametrize("as_they_are", [False, True])
def test_every_backend_of_a_case_is_told_once(case_id, as_they_are, telling, matrix):
    case = next(case for case in matrix.cases() if case.id == case_id)
    trace = drive(case, build_scenario(case, matrix, "cpu"), telling, "cpu", lists_as_they_are=as_they_are)
    assert not trace.violations
    assert telling.built
    assert {backend.told for backend in telling.built} == {0 if as_they_are else 1}


def test_no_backend_of_the_gate_is_told(telling, matrix):
    case = next(case for case in matrix.cases() if case.id == "r0-eager-decode-within-window")
    composition = compose(case, matrix, "cpu", [ALONE], 1)
    trace, answers = drive_composition(case, composition, telling, "cpu", padded=True)
    assert not trace.violations
    assert answers
    assert {backend.told for backend in telling.built} == {0}


def test_a_backend_without_lists_is_driven_as_it_is(toy):
    runner = object()
    assert BeyondLengths(lambda given: given)(runner) is runner
