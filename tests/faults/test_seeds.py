"""More draws of a case: the worst of them is its result, and the first bad one ends it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dsv4_matrix.declaration.model import Case, Probe, Variant
from dsv4_matrix.execution import Execution, draws, together
from dsv4_matrix.report.result import Outcome, Result
from dsv4_matrix.report.transport import spent_in, spent_property

CASE = Case("r0-eager-a", "case", variant=Variant("a", "decode", (64,)))


def done(case_id: str, margin: str, outcome: Outcome = Outcome.PASSED, reason: str = "") -> Execution:
    return Execution(Result(case_id, "r0/eager", "case", outcome, reason, margin, captures=1, replays=3), reason)


def test_the_declared_seed_comes_first_and_all_differ() -> None:
    drawn = list(draws(CASE, 20))
    assert drawn[0] is CASE
    assert len({case.seed for case in drawn}) == 20
    assert {case.variant for case in drawn} == {CASE.variant}


def test_a_probe_runs_once() -> None:
    probe = Case("r0-eager-refused", "probe", probe=Probe("page-size", "AssertionError", "page"))
    assert list(draws(probe, 20)) == [probe]


@pytest.mark.parametrize(
    ("one", "two", "worst"), [("0.50", "0.61", "0.61"), ("0.61", "0.50", "0.61"), ("", "9.5e-2", "9.5e-2")]
)
def test_the_worst_margin_and_all_replays_count(one: str, two: str, worst: str) -> None:
    both = together(done("r0-eager-a", one), done("r0-eager-a#1", two))
    assert both.result == Result("r0-eager-a", "r0/eager", "case", Outcome.PASSED, "", worst, captures=2, replays=6)


def test_what_phases_take_is_added_up() -> None:
    one, two = (replace(done("r0-eager-a", "0.5"), spent={"build": 1.0, "judge": 0.25}) for _ in range(2))
    assert together(one, replace(two, spent={"build": 0.5, "drive": 2.0})).spent == {
        "build": 1.5,
        "judge": 0.25,
        "drive": 2.0,
    }
    assert spent_in([spent_property(one.spent)]) == {"build": 1.0, "judge": 0.25}
    assert spent_in([]) == {}


def test_a_bad_draw_is_the_result() -> None:
    bad = done("r0-eager-a#1", "7.5", Outcome.FAILED, "r0-eager-a#1: worst row 3")
    both = together(done("r0-eager-a", "0.50"), bad)
    result = both.result
    assert (result.id, result.outcome, result.reason) == ("r0-eager-a", Outcome.FAILED, "r0-eager-a: worst row 3")
    assert both.message == "r0-eager-a: worst row 3\n  draw     1, which needs --seeds 2"
    assert together(both, done("r0-eager-a#2", "0.1")) is both


def test_every_case_is_drawn_so_often_and_reported_once(rig: Any, all_cases: tuple[str, ...]) -> None:
    assert rig.run("-n2", "--matrix-seeds", "3").ret == 0
    expected = [f"{case_id}{suffix}" for case_id in all_cases for suffix in ("", "#1", "#2")]
    assert sorted(case_id for case_id, _, _ in rig.ran) == sorted(expected)
    assert set(rig.lines()) == set(all_cases)
    assert {line["replays"] for line in rig.lines().values()} == {9}


def test_a_fault_in_a_later_draw_is_the_cases(rig: Any, all_cases: tuple[str, ...]) -> None:
    faults = {"r0-eager-a#1": "exit", "r0-cg-decode-b#2": "fail"}
    assert rig.run("-n2", "--matrix-seeds", "3", faults=faults).ret == 1
    short = {i: line["outcome"] for i, line in rig.lines().items() if line["outcome"] != "passed"}
    assert short == {"r0-eager-a": "lost", "r0-cg-decode-b": "failed"}


@pytest.mark.parametrize("seeds", ["0", "-1", "x", "1.5", "10001", "²"])
def test_a_number_that_is_none_is_bad_input(rig: Any, seeds: str) -> None:
    result = rig.run("--matrix-seeds", seeds)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"--matrix-seeds: '{seeds}' is not a number from 1 to 10000" in result.stderr.str()
