"""Every declared case has exactly one line at the end, whatever arrived."""

from __future__ import annotations

import pytest

from dsv4_matrix.declaration.model import Matrix
from dsv4_matrix.report.ledger import DuplicateResultError, Ledger, fell_short
from dsv4_matrix.report.result import Outcome, Result, format_margin, without_machine
from dsv4_matrix.report.transport import from_properties, to_properties


@pytest.fixture
def ledger(matrix: Matrix) -> Ledger:
    return Ledger({case.id: case for case in matrix.cases()}, {"r0-cg-decode-huge": "declared for gpu only"})


def test_missing_results_become_lines(ledger: Ledger) -> None:
    ledger.planned = {"r0-eager-a", "r0-eager-b"}
    ledger.record(Result("r0-eager-a", "r0/eager", "case", Outcome.PASSED, margin="0.5"))
    lines = {result.id: (result.outcome.value, result.reason) for result in ledger.complete()}
    assert lines == {
        "r0-cg-decode-huge": ("not-run", "declared for gpu only"),
        "r0-cg-decode-small": ("not-run", "not selected in this run"),
        "r0-eager-a": ("passed", ""),
        "r0-eager-b": ("lost", "no result came back: its worker died or the run was stopped"),
        "r4-cg-decode-refused": ("not-run", "not selected in this run"),
        "r4-eager-refused": ("not-run", "not selected in this run"),
        "refusal-head-dim": ("not-run", "not selected in this run"),
    }
    assert list(lines) == sorted(lines)
    assert [result.id for result in fell_short(ledger.complete())] == ["r0-eager-b"]


def test_a_second_result_is_an_error(ledger: Ledger) -> None:
    result = Result("r0-eager-a", "r0/eager", "case", Outcome.FAILED)
    ledger.record(result)
    with pytest.raises(DuplicateResultError, match="case r0-eager-a has two results: failed, then failed"):
        ledger.record(result)


def test_an_undeclared_case_is_an_error(ledger: Ledger) -> None:
    with pytest.raises(KeyError, match="r9-eager-a"):
        ledger.record(Result("r9-eager-a", "r9/eager", "case", Outcome.PASSED))


def test_results_survive_the_transport() -> None:
    result = Result("r0-eager-a", "r0/eager", "case", Outcome.INSENSITIVE, "blind", "0.50", 2, 6)
    properties = to_properties(result)
    assert {type(value) for _, value in properties} <= {str, bool, int}
    assert from_properties([("other", 1), *properties]) == result
    assert from_properties(properties[1:]) is None


@pytest.mark.parametrize("value", [2**31, -1, 1.0, None])
def test_what_would_end_the_run_in_transport_is_caught_before(value: object) -> None:
    result = Result("r0-eager-a", "r0/eager", "case", Outcome.PASSED, replays=value)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="case r0-eager-a: replays must be str, bool or an int of 31 bits"):
        to_properties(result)


def test_numpy_scalars_do_not_travel() -> None:
    numpy = pytest.importorskip("numpy")
    with pytest.raises(TypeError, match="int64"):
        to_properties(Result("a", "b", "case", Outcome.PASSED, captures=numpy.int64(3)))


@pytest.mark.parametrize(
    ("margin", "text"),
    [
        (0.0, "0.0"),
        (0.6, "0.60"),
        (0.04567, "0.046"),
        (0.999, "1.0"),
        (12.4, "12"),
        (99.96, "1.0e+02"),
        (1234.0, "1.2e+03"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
    ],
)
def test_margins_have_two_significant_digits(margin: float, text: str) -> None:
    assert format_margin(margin) == text


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("<Pool object at 0x7f00deadbeef>", "<Pool object at 0x…>"),
        ("cannot open /home/someone/cache/k.json now", "cannot open …/k.json now"),
        ("scale byte 0xFF, 3/4 of r4/cg-decode, a/b", "scale byte 0xFF, 3/4 of r4/cg-decode, a/b"),
    ],
)
def test_reasons_keep_no_trace_of_a_machine(said: str, kept: str) -> None:
    assert without_machine(said) == kept
