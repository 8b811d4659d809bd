"""JUnit XML: counts that add up, properties of the cell, and text that XML cannot hold."""

from __future__ import annotations

from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from dsv4_matrix.declaration.model import Matrix
from dsv4_matrix.report.junit import junit_xml
from dsv4_matrix.report.result import Outcome, Report
from dsv4_matrix.report.telemetry import Telemetry

Maker = Callable[..., Report]


def test_suites_are_cells_and_counts_add_up(make: Maker, matrix: Matrix) -> None:
    root = ElementTree.fromstring(junit_xml(make("cpu"), {}))
    suites = {suite.get("name"): suite for suite in root}
    assert set(suites) == {cell.id for cell in matrix.cells if cell.variants or cell.probe} | {"refusals"}
    assert sum(int(suite.get("tests", "")) for suite in root) == len(matrix.cases())
    skipped = len(matrix.cases()) - len(matrix.cases("cpu"))
    assert sum(int(suite.get("skipped", "")) for suite in root) == skipped == len(root.findall(".//skipped"))


@pytest.mark.parametrize(
    ("outcome", "element"), [("failed", "failure"), ("insensitive", "failure"), ("lost", "error"), ("timeout", "error")]
)
def test_what_fell_short_has_its_element_reason_and_message(
    make: Maker, outcome: str, element: str, case_id: str
) -> None:
    report = make("gpu", change={case_id: {"outcome": Outcome(outcome), "reason": "first\nsecond"}})
    told = {case_id: Telemetry(case_id, 1.5, "gw0", "host", "the <whole> screen\x1b[31m \ud800")}
    root = ElementTree.fromstring(junit_xml(report, told))
    case = root.find(f".//testcase[@name='{case_id}']")
    assert case is not None
    found = case.find(element)
    assert found is not None
    assert found.get("message") == f"{outcome}: first"
    assert found.text == "the <whole> screen\ufffd[31m \ufffd"
    assert case.get("time") == "1.500"
    properties = {p.get("name"): p.get("value") for p in case.iter("property")}
    assert properties["cell"] == "r4/cg-decode"
    assert properties["outcome"] == outcome
    suite = root.find("./testsuite[@name='r4/cg-decode']")
    assert suite is not None
    assert suite.get(f"{element}s") == "1"


def test_header_is_in_every_suite_and_no_host(make: Maker, case_id: str) -> None:
    told = {case_id: Telemetry(case_id, 1.5, "gw7", "secret-host", "")}
    data = junit_xml(make("gpu"), told)
    root = ElementTree.fromstring(data)
    for suite in root:
        names = {p.get("name"): p.get("value") for p in suite.findall("./properties/property")}
        assert names["device_model"] == "Test GPU"
    assert b"secret-host" not in data
