"""Which kernel served: what a backend tells is checked and stands in the header; explain reads it without an import."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4_matrix.declaration.model import Matrix
from dsv4_matrix.report import kernels
from dsv4_matrix.report.canonical import ReportError, dumps, loads
from dsv4_matrix.report.evidence import currency, evidence_markdown
from dsv4_matrix.report.kernels import (
    DeclaredKernel,
    KernelsError,
    ServedCall,
    declared_kernels,
    header_text,
    kernel_paths,
    read_table,
    reasons_text,
    table_text,
)
from dsv4_matrix.report.merge import MergeError, merge
from dsv4_matrix.report.result import Report

TOLD = [
    {"call": "attention/16", "kernel": "slow", "why": "16 heads"},
    {"call": "attention/64", "kernel": "fast", "why": "64 heads"},
    {"call": "prefill", "kernel": "slow", "why": "16 heads"},
]
HEADER = "slow: attention/16, prefill; fast: attention/64"
ENTRY = {"call": "attention", "kernel": "fast", "architectures": ["sm90"], "setting": "FAST=1", "when": "64 heads"}


def telling(answer: Any) -> SimpleNamespace:
    return SimpleNamespace(kernel_paths=lambda device: answer)


def test_the_header_groups_calls_by_kernel() -> None:
    paths = kernel_paths(telling(TOLD), "cpu")
    assert header_text(paths) == HEADER
    assert reasons_text(paths) == ["slow serves attention/16, prefill: 16 heads", "fast serves attention/64: 64 heads"]


def test_a_backend_that_tells_nothing_has_no_kernels() -> None:
    assert kernel_paths(object(), "cpu") == ()
    assert header_text(()) == ""


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("fast", "must return a list of mappings, got str"),
        ({"call": "fast"}, "must return a list of mappings, got dict"),
        (None, "must return a list of mappings, got NoneType"),
        (["fast"], r"\[0\]: expected a mapping with call, kernel, why, got str"),
        ([{"call": "a", "kernel": "b"}], r"\[0\]: expected a mapping with call, kernel, why, got \['call', 'kernel'\]"),
        ([{**TOLD[0], "kernel": None}], r"\[0\]: kernel must be text on one line, got None"),
        ([{**TOLD[0], "kernel": "a; b"}], r"\[0\]: kernel must be a name without comma, colon or semicolon"),
        ([{**TOLD[0], "call": ""}], r"\[0\]: call must be a name"),
        ([{**TOLD[0], "why": " "}], r"\[0\]: why is empty"),
        ([TOLD[0], TOLD[1], TOLD[0]], "names attention/16 twice; one kernel serves a call"),
    ],
)
def test_an_answer_that_is_no_answer_is_named(answer: Any, told: str) -> None:
    with pytest.raises(KernelsError, match=rf"^kernel_paths\('cpu'\).*{told}"):
        kernel_paths(telling(answer), "cpu")


def test_a_backend_that_raises_is_named() -> None:
    def ask(device: str) -> None:
        raise RuntimeError(f"no {device}")

    with pytest.raises(KernelsError, match="raised RuntimeError: no cuda"):
        kernel_paths(SimpleNamespace(kernel_paths=ask), "cuda")


def test_a_report_holds_its_kernels(report: Report) -> None:
    told = replace(report, header=replace(report.header, kernels=HEADER))
    line = dumps(told).decode().splitlines()[0]
    assert json.loads(line)["kernels"] == HEADER
    assert loads(dumps(told)) == told


def test_a_report_without_them_is_as_before(report: Report) -> None:
    assert b"kernels" not in dumps(report)
    assert loads(dumps(report)).header.kernels == ""


def test_an_empty_one_is_not_canonical(report: Report) -> None:
    text = dumps(report).decode().replace('"matrix_sha256"', '"kernels":"","matrix_sha256"', 1)
    with pytest.raises(ReportError, match="r:1: kernels is empty, and then not written"):
        loads(text.encode(), "r")


@pytest.mark.parametrize("other", ["slow: attention", ""])
def test_reports_of_other_kernels_do_not_merge(report: Report, other: str) -> None:
    one = Report(replace(report.header, kernels=HEADER), report.results[:3])
    two = Report(replace(report.header, kernels=other), report.results[3:])
    with pytest.raises(MergeError, match=f"kernels differs: .*{HEADER}' in a"):
        merge([("a", one), ("b", two)])


def test_evidence_shows_them(matrix: Matrix, report: Report, tmp_path: Path) -> None:
    (tmp_path / "gpu.jsonl").write_bytes(dumps(replace(report, header=replace(report.header, kernels=HEADER))))
    assert f"\nNVIDIA H200, kernels: {HEADER}:\n" in evidence_markdown(matrix, tmp_path)


def test_evidence_without_them_is_not_current_where_the_backend_has_several(matrix: Matrix, report: Report) -> None:
    here = report.header.fingerprint
    complete = replace(report, header=replace(report.header, kernels=HEADER))
    assert currency(complete, matrix, here) == "current"
    assert currency(report, matrix, here) == "not current: does not tell which kernels served"
    other = replace(report, header=replace(report.header, backend="no.such:Backend"))
    assert currency(other, matrix, here) == "current"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], str]:
    """An import package with a table, which must not be imported; gives ``module:attr`` of its backend."""

    def make(table: Any) -> str:
        folder = tmp_path / "telling_backend"
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
        (folder / kernels.TABLE).write_text(table if isinstance(table, str) else json.dumps(table))
        monkeypatch.syspath_prepend(str(tmp_path))
        return "telling_backend.attention:Backend"

    return make


def test_a_table_is_read_without_importing_the_backend(package: Callable[[Any], str]) -> None:
    name = package([ENTRY, {**ENTRY, "kernel": "slow", "setting": "", "when": ""}])
    table = declared_kernels(name)
    assert table[0] == DeclaredKernel("attention", "fast", ("sm90",), "FAST=1", "64 heads")
    assert table_text(table) == [
        "attention: fast on sm90 with FAST=1 (64 heads)",
        "attention: slow on sm90 (all others)",
    ]
    assert "telling_backend" not in sys.modules


@pytest.mark.parametrize("name", ["nobody", "no.such:Backend", "json:loads", ":", ""])
def test_a_backend_without_a_table_declares_nothing(name: str) -> None:
    assert declared_kernels(name) == ()


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ("{", "cannot be read as JSON"),
        ({}, "must be a list, got dict"),
        ([3], r"\[0\]: expected a mapping with call, kernel, setting, when, got int"),
        ([{**ENTRY, "extra": 1}], r"\[0\]: expected a mapping"),
        ([ENTRY, {**ENTRY, "architectures": "sm90"}], r"\[1\]: architectures must be a list of names, got 'sm90'"),
        ([{**ENTRY, "architectures": [9]}], r"\[0\]: architectures must be a list of names, got \[9\]"),
        ([{key: value for key, value in ENTRY.items() if key != "architectures"}], r"\[0\]: architectures must be"),
        ([{**ENTRY, "when": "a\nb"}], r"\[0\]: when must be text on one line"),
    ],
)
def test_a_table_that_is_none_is_named_with_its_file(package: Callable[[Any], str], table: Any, told: str) -> None:
    with pytest.raises(KernelsError, match=rf"{kernels.TABLE}.*{told}"):
        declared_kernels(package(table))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(KernelsError, match="absent"):
        read_table(tmp_path / "absent.json")


def test_served_calls_are_values() -> None:
    assert kernel_paths(telling(iter(TOLD)), "cpu")[1] == ServedCall("attention/64", "fast", "64 heads")
