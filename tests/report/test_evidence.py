"""Evidence: what is shown as proven, when it is current, and what a broken file leads to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsv4_matrix.declaration.model import Matrix
from dsv4_matrix.report import canonical
from dsv4_matrix.report.canonical import ReportError
from dsv4_matrix.report.evidence import currency, evidence_markdown
from dsv4_matrix.report.fingerprint import fingerprint
from dsv4_matrix.report.result import Outcome, Report
from dsv4_matrix.report.table import cell_text, matrix_table, refusals_text, worst_margin

KERNELS = "portable: attention, sparse-prefill"


def test_each_device_is_a_row_and_a_matrix(matrix: Matrix, report: Report, tmp_path: Path) -> None:
    current = replace(
        report, header=replace(report.header, fingerprint=fingerprint(Path(matrix.path)), kernels=KERNELS)
    )
    canonical.write(current, tmp_path / "nvidia-h200.jsonl")
    other = replace(report, header=replace(report.header, device_model="CPU interpreter"))
    canonical.write(other, tmp_path / "cpu-interpreter.jsonl")
    (tmp_path / "nvidia-h200.telemetry.jsonl").write_text("not a report")
    text = evidence_markdown(matrix, tmp_path)
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert rows[0] == [
        "device", "backend", "torch, triton", "cases passed", "refusals seen", "worst margin", "graphs", "sources",
    ]  # fmt: skip
    same = ["triton", "2.11.0, 3.6.0", "2/3 (1 not run)", "3/3", "12", "1 captured, 4 replayed"]
    assert rows[2] == ["CPU interpreter", *same, "not current: recorded on other sources"]
    assert rows[3] == ["NVIDIA H200", *same, "current"]
    assert [row[:3] for row in rows[6:8]] == [
        ["CPU interpreter", "", "not recorded"],
        ["NVIDIA H200", "", "not recorded"],
    ]
    assert rows[8:12] == [
        ["mode", "ratio 0", "ratio 4"],
        rows[9],
        ["Eager", "1/2 12, 1 failed", "deferred"],
        ["CG decode", "1/2 0.31, 1 not run, 1 captured, 4 replayed", "not-applicable"],
    ]
    assert text.endswith(".\n")


def test_no_evidence_is_said(matrix: Matrix, tmp_path: Path) -> None:
    assert evidence_markdown(matrix, tmp_path).startswith("No evidence is recorded yet")
    assert evidence_markdown(matrix, tmp_path / "absent").startswith("No evidence is recorded yet")


def test_a_malformed_file_is_an_error_with_its_place(matrix: Matrix, report: Report, tmp_path: Path) -> None:
    canonical.write(report, tmp_path / "nvidia-h200.jsonl")
    with (tmp_path / "nvidia-h200.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(ReportError, match=r"nvidia-h200\.jsonl:9: missing captures"):
        evidence_markdown(matrix, tmp_path)


def test_a_file_in_place_of_the_folder_is_an_error(matrix: Matrix, tmp_path: Path) -> None:
    (tmp_path / "evidence").write_text("")
    with pytest.raises(ReportError, match="evidence: is not a folder of reports"):
        evidence_markdown(matrix, tmp_path / "evidence")


def test_currency(matrix: Matrix, report: Report) -> None:
    here = report.header.fingerprint
    report = replace(report, header=replace(report.header, kernels=KERNELS))
    assert currency(report, matrix, here) == "current"
    assert currency(report, matrix, "00") == "not current: recorded on other sources"
    assert currency(report, replace(matrix, sha256="00"), here) == "not current: recorded with another matrix.yaml"
    assert currency(replace(report, results=report.results[1:]), matrix, here) == (
        "not current: 1 declared cases are missing"
    )


def test_a_cell_shows_each_way_of_falling_short(matrix: Matrix, report: Report) -> None:
    cell, results = matrix.cells[0], report.results[2:4]
    assert cell_text(cell, results) == "1/2 12, 1 failed"
    for outcome in Outcome:
        if outcome is not Outcome.PASSED:
            shown = cell_text(cell, [results[0], replace(results[1], outcome=outcome, margin="")])
            assert shown == f"1/2 0.62, 1 {outcome.value.replace('-', ' ')}"
    assert cell_text(cell, []) == "not recorded"
    assert cell_text(cell, [replace(result, outcome=Outcome.NOT_RUN) for result in results]) == "2 not run"


def test_a_refusal_that_was_not_seen_is_shown(matrix: Matrix, report: Report) -> None:
    broken = replace(report.results[5], outcome=Outcome.FAILED)
    assert cell_text(matrix.cells[1], [broken]) == "deferred, probe failed"
    assert cell_text(matrix.cells[1], []) == "deferred, probe not run"
    assert "deferred, probe failed" in matrix_table(matrix, [*report.results[:5], broken])
    assert refusals_text(report.results) == "1/1 refusals outside the cells hold"
    broken = replace(report.results[6], outcome=Outcome.FAILED)
    assert refusals_text([broken]) == "0/1 refusals outside the cells hold; not: refusal-head-dim"


def test_a_table_of_some_modes_shows_no_other(matrix: Matrix, report: Report) -> None:
    titles = {mode.name: mode.title for mode in matrix.modes}
    assert len(titles) > 1
    for name, title in titles.items():
        shown = matrix_table(matrix, report.results, modes=[name])
        assert [line for line in matrix_table(matrix, report.results).splitlines() if line.startswith(title)]
        assert [line.split("  ")[0] for line in shown.splitlines()[2:]] == [title]


def test_a_refusal_that_was_not_run_neither_holds_nor_fails(report: Report) -> None:
    waiting = replace(report.results[6], id="refusal-other", outcome=Outcome.NOT_RUN)
    assert refusals_text([report.results[6], waiting]) == "1/1 refusals outside the cells hold; 1 not run"
    assert refusals_text([waiting]) == "no refusal outside the cells was run, of 1"
    assert refusals_text([]) == "no refusal outside the cells was run, of 0"


def test_nan_is_the_worst_margin(report: Report) -> None:
    results = [replace(report.results[2], margin=margin) for margin in ("0.62", "nan", "inf", "12")]
    assert worst_margin(results) == "nan"
    assert worst_margin(results[2:]) == "inf"
    assert worst_margin([]) == ""
