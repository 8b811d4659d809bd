"""The gate's verdict as evidence: read back as written, told in words, out of date with what decides it."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from dsv4_matrix.declaration.model import Level, Matrix
from dsv4_matrix.report.canonical import ReportError
from dsv4_matrix.report.fingerprint import HARNESS, fingerprint
from dsv4_matrix.report.gate_evidence import (
    SOURCES,
    GateEvidence,
    currency,
    gate_fingerprint,
    gate_markdown,
    read,
    write,
)
from dsv4_matrix.report.result import Header

PACKAGE = Path(__file__).parents[2] / "dsv4_matrix"
HEADER = {field.name: "x" for field in fields(Header)}


@pytest.fixture
def evidence(header: Header) -> GateEvidence:
    return GateEvidence(header, "ef" * 32, "12" * 32, "NVIDIA H200 sm_90", "CUDA 13000", Level.GRAPH, 118, 412)


def test_it_is_read_as_written(evidence: GateEvidence, tmp_path: Path) -> None:
    path = tmp_path / "nvidia-h200.gate.json"
    write(evidence, path)
    assert read(path) == evidence
    again = tmp_path / "again.gate.json"
    write(read(path), again)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, "aligned"),
        ({"differ": 3}, "NOT aligned: 3 rows differ"),
        ({"missing": 1, "short": 2}, "NOT aligned: 1 rows missing in a run, 2 cases fell short"),
        ({"uncaught": 1}, "NOT aligned: 1 canaries not caught"),
        ({"rows": 0}, "NOT aligned: nothing compared"),
    ],
)
def test_it_is_aligned_only_if_nothing_speaks_against_it(evidence: GateEvidence, change: dict, told: str) -> None:
    found = replace(evidence, **change)
    assert str(found) == told
    assert found.aligned == (not change)


def test_each_device_is_a_row(matrix: Matrix, evidence: GateEvidence, tmp_path: Path) -> None:
    here = gate_fingerprint(Path(matrix.path))
    write(replace(evidence, gate_sources=here), tmp_path / "nvidia-h200.gate.json")
    b200 = replace(evidence.header, device_model="NVIDIA B200")
    write(replace(evidence, header=b200, differ=2), tmp_path / "nvidia-b200.gate.json")
    text = gate_markdown(matrix, tmp_path, ["CPU interpreter", "NVIDIA H200"])
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in text.splitlines()]
    told = ["412 rows of 118 cases", "2.11.0, 3.6.0, CUDA 13000"]
    assert rows[2:] == [
        ["CPU interpreter", "", "not recorded", "", "", ""],
        ["NVIDIA B200", "L3", "NOT aligned: 2 rows differ", *told, "not current: recorded on other sources"],
        ["NVIDIA H200", "L3", "aligned", *told, "current"],
    ]


def test_currency(matrix: Matrix, evidence: GateEvidence) -> None:
    assert currency(evidence, matrix, evidence.gate_sources) == "current"
    assert currency(evidence, matrix, "00") == "not current: recorded on other sources"
    other = replace(matrix, sha256="00")
    assert currency(evidence, other, evidence.gate_sources) == "not current: recorded with another matrix.yaml"


@pytest.mark.parametrize("part", [*HARNESS, *SOURCES])
def test_every_source_that_decides_a_verdict_is_in_its_fingerprint(matrix: Matrix, tmp_path: Path, part: str) -> None:
    package = tmp_path / "dsv4_matrix"
    for name in (*HARNESS, *SOURCES):
        assert (PACKAGE / name).exists(), name
        file = package / name if name.endswith(".py") else package / name / "code.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("sound")
    for root in ("backends", "references"):
        (tmp_path / root / "own").mkdir(parents=True)
        (tmp_path / root / "own" / "__init__.py").write_text("")
    before = fingerprint(Path(matrix.path), package, SOURCES)
    changed = package / part if part.endswith(".py") else package / part / "code.py"
    changed.write_text("changed")
    assert fingerprint(Path(matrix.path), package, SOURCES) != before


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rows": None}, "rows"),
        ({"rows": "412"}, "rows must be int, got '412'"),
        ({"cases": True}, "cases must be int, got True"),
        ({"differ": -1}, "differ must not be negative"),
        ({"driver": 13}, "driver must be str"),
        ({"level": "L9"}, "L9"),
        ({"host": "box"}, "unexpected keyword argument 'host'"),
        ({"header": {"host": "box"}}, "keyword argument"),
        ({"header": {**HEADER, "torch": 2}}, "header.torch must be str, got 2"),
        ({"schema": "other"}, "is not of schema dsv4-matrix-gate/1"),
    ],
)
def test_another_file_is_refused(evidence: GateEvidence, tmp_path: Path, change: dict, told: str) -> None:
    path = tmp_path / "nvidia-h200.gate.json"
    write(evidence, path)
    value = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))
    with pytest.raises(ReportError, match=told) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gate.json").write_text("{")
    with pytest.raises(ReportError, match="not JSON"):
        read(tmp_path / "x.gate.json")
    with pytest.raises(ReportError, match="cannot read"):
        read(tmp_path / "absent.gate.json")
