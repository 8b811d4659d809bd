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
from dsv4_matrix.report.gaps import gaps
from dsv4_matrix.report.merge import INTERPRETER, MergeError, merge
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


def test_a_missing_shard_is_told_by_its_cells(make: Maker, matrix: Matrix) -> None:
    """Whole cells by name with their number of cases, so that every case is told once."""
    found = gaps(merge(named(make("gpu", "1/3"), make("gpu", "3/3"))), matrix)
    (gap,) = found.told()
    assert gap.head == f"{len(found.missing)} missing, declared for this device but in no report"
    missing = set(found.missing)
    for name in gap.names:
        cell, _, count = name.partition(" (")
        cases = [case.id for case in matrix.cases("gpu") if cell in (case.cell_id, case.id)]
        assert count in ("", f"{len(cases)} cases)")
        assert cases
        assert missing.issuperset(cases)
        missing.difference_update(cases)
    assert not missing
    assert len(gap.names) < len(found.missing) / 3


def test_a_cell_that_ran_in_part_is_told_by_its_cases(make: Maker, matrix: Matrix, case_id: str) -> None:
    cell = next(case.cell_id for case in matrix.cases() if case.id == case_id)
    others = [case.id for case in matrix.cases("gpu") if case.cell_id == cell and case.id != case_id]
    not_run = {"outcome": Outcome.NOT_RUN, "reason": "not selected"}
    (gap,) = gaps(make("gpu", change=dict.fromkeys(others, not_run)), matrix).told()
    assert list(gap.names) == sorted(others)
    (gap,) = gaps(make("gpu", change=dict.fromkeys([*others, case_id], not_run)), matrix).told()
    assert gap.names == (f"{cell} ({len(others) + 1} cases)",)


def test_refusals_that_nobody_ran_are_told_together(make: Maker, matrix: Matrix) -> None:
    ids = [case.id for case in matrix.cases() if case.kind == "refusal"]
    not_run = {"outcome": Outcome.NOT_RUN, "reason": "not selected"}
    (gap,) = gaps(make("gpu", change=dict.fromkeys(ids, not_run)), matrix).told()
    assert gap.names == (f"refusals ({len(ids)} cases)",)


def test_cases_of_another_device_are_not_missing(make: Maker, matrix: Matrix) -> None:
    found = gaps(make("cpu"), matrix)
    assert found.told() == ()


def test_gpu_cases_are_missing_from_a_gpu_report(make: Maker, matrix: Matrix) -> None:
    here, everywhere = matrix.cases("gpu"), {case.id for case in matrix.cases("cpu")}
    case = next(case.id for case in here if case.id not in everywhere)
    report = make("gpu", change={case: {"outcome": Outcome.NOT_RUN, "reason": "declared for gpu only"}})
    assert gaps(report, matrix).missing == (case,)


def test_a_lost_case_is_named(make: Maker, matrix: Matrix, case_id: str) -> None:
    report = merge(named(make("gpu", change={case_id: {"outcome": Outcome.LOST, "reason": "its worker died"}})))
    assert gaps(report, matrix).lost == (case_id,)
    (gap,) = gaps(report, matrix).told()
    assert (gap.head, gap.names) == ("1 lost, no result came back", (case_id,))


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
