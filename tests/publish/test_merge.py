"""Merged reports: the bytes of one run whatever the split and the order; an error for what is not one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4_matrix.declaration.model import Matrix
from dsv4_matrix.report.canonical import dumps
from dsv4_matrix.report.merge import INTERPRETER, MergeError, gaps, merge
from dsv4_matrix.report.result import Outcome, Report

Maker = Callable[..., Report]


def named(*reports: Report) -> list[tuple[str, Report]]:
    return [(f"{index}.jsonl", report) for index, report in enumerate(reports)]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("total", [1, 2, 3, 5])
def test_any_number_of_shards_gives_the_bytes_of_one_run(make: Maker, device: str, total: int) -> None:
    shards = [make(device, f"{index}/{total}") for index in range(1, total + 1)]
    assert dumps(merge(named(*shards))) == dumps(make(device))


def test_order_and_grouping_do_not_matter(make: Maker) -> None:
    shards = [make("gpu", f"{index}/3") for index in (1, 2, 3)]
    whole = dumps(make("gpu"))
    for order in permutations(shards):
        assert dumps(merge(named(*order))) == whole
        a, b, c = order
        assert dumps(merge(named(merge(named(a, b)), c))) == whole
        assert dumps(merge(named(a, merge(named(b, c))))) == whole


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(total=st.integers(2, 8), random=st.randoms(use_true_random=False), data=st.data())
def test_partial_merges_are_the_same_in_any_order(make: Maker, total: int, random: object, data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(1, total), min_size=1))
    shards = [make("gpu", f"{index}/{total}") for index in sorted(chosen)]
    before = dumps(merge(named(*shards)))
    random.shuffle(shards)  # type: ignore[attr-defined]
    assert dumps(merge(named(*shards))) == before


def test_reasons_of_cases_that_nobody_ran_do_not_depend_on_order(make: Maker, case_id: str) -> None:
    one = make("gpu", "1/2", change={case_id: {"outcome": Outcome.NOT_RUN, "reason": "not selected in this run"}})
    other = make("gpu", "2/2", change={case_id: {"outcome": Outcome.NOT_RUN, "reason": "in another shard"}})
    assert dumps(merge(named(one, other))) == dumps(merge(named(other, one)))


def test_a_missing_shard_is_named_case_by_case(make: Maker, matrix: Matrix) -> None:
    found = gaps(merge(named(make("gpu", "1/3"), make("gpu", "3/3"))), matrix)
    second = {r.id for r in make("gpu", "2/3").results if r.outcome is Outcome.PASSED}
    assert set(found.missing) == second
    assert sorted(second)[0] in found.sentences()[0]


def test_cases_of_another_device_are_not_missing(make: Maker, matrix: Matrix) -> None:
    found = gaps(make("cpu"), matrix)
    assert found.sentences() == ()


def test_gpu_cases_are_missing_from_a_gpu_report(make: Maker, matrix: Matrix) -> None:
    here, everywhere = matrix.cases("gpu"), {case.id for case in matrix.cases("cpu")}
    case = next(case.id for case in here if case.id not in everywhere)
    report = make("gpu", change={case: {"outcome": Outcome.NOT_RUN, "reason": "declared for gpu only"}})
    assert gaps(report, matrix).missing == (case,)


def test_a_lost_case_is_named(make: Maker, matrix: Matrix, case_id: str) -> None:
    report = merge(named(make("gpu", change={case_id: {"outcome": Outcome.LOST, "reason": "its worker died"}})))
    assert gaps(report, matrix).lost == (case_id,)
    assert "1 lost" in gaps(report, matrix).sentences()[0]


def test_a_case_that_is_not_declared_is_named(make: Maker, matrix: Matrix) -> None:
    report = make("gpu")
    stray = replace(report.results[0], id="r9-eager-stray")
    assert gaps(Report(report.header, (*report.results, stray)), matrix).undeclared == ("r9-eager-stray",)


@pytest.mark.parametrize("first", [Outcome.PASSED, Outcome.LOST])
def test_a_case_in_two_reports_is_an_error_even_if_it_then_passes(make: Maker, first: Outcome, case_id: str) -> None:
    one = make("gpu", "1/2", change={case_id: {"outcome": first}})
    other = make("gpu", "2/2", change={case_id: {"outcome": Outcome.PASSED}})
    with pytest.raises(MergeError, match=rf"case {case_id} was run twice: 0.jsonl \({first}\), 1.jsonl \(passed\)"):
        merge(named(one, other))


def test_the_same_report_twice_is_an_error(make: Maker) -> None:
    with pytest.raises(MergeError, match="run twice"):
        merge(named(make("gpu", "1/2"), make("gpu", "1/2")))


@pytest.mark.parametrize("key", ["matrix_sha256", "fingerprint", "backend", "device_model", "torch", "triton"])
def test_another_header_is_an_error_that_names_key_and_files(make: Maker, key: str) -> None:
    one, other = make("gpu", "1/2"), make("gpu", "2/2")
    other = Report(replace(other.header, **{key: "another"}), other.results)
    with pytest.raises(MergeError, match=f"{key} differs: .*'another' in 1.jsonl"):
        merge(named(one, other))


def test_nothing_to_merge_is_an_error() -> None:
    with pytest.raises(MergeError, match="no report"):
        merge([])


def test_a_report_of_another_declaration_is_refused(make: Maker, matrix: Matrix) -> None:
    report = make("gpu")
    stale = Report(replace(report.header, matrix_sha256="0" * 64), report.results)
    with pytest.raises(MergeError, match=r"with a matrix\.yaml of sha256 000000000000"):
        gaps(stale, matrix)


def test_the_interpreters_name_is_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from dsv4_matrix.machine import find_machine

    assert find_machine().model == INTERPRETER
