"""A report as JUnit XML, for CI systems that show it: one suite a cell, the result's fields as properties."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from xml.etree import ElementTree

from dsv4_matrix.report.result import Outcome, Report, Result
from dsv4_matrix.report.telemetry import Telemetry

#: Element for an outcome: ``failure`` is a judgement of the backend, ``error`` anything that kept it from one.
_ELEMENT = {
    Outcome.FAILED: "failure",
    Outcome.INSENSITIVE: "failure",
    Outcome.ERROR: "error",
    Outcome.TIMEOUT: "error",
    Outcome.LOST: "error",
    Outcome.NOT_RUN: "skipped",
}

#: XML 1.0 has no way to write these at all.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(report: Report, telemetry: Mapping[str, Telemetry]) -> bytes:
    """UTF-8 XML with a final newline. Durations and messages come from ``telemetry``, by case id, where it has them."""
    root = ElementTree.Element("testsuites", name="dsv4-matrix")
    suites: dict[str, list[Result]] = {}
    for result in report.results:
        suites.setdefault(result.cell or "refusals", []).append(result)
    for name, results in sorted(suites.items()):
        suite = ElementTree.SubElement(root, "testsuite", _counts(name, results))
        properties = ElementTree.SubElement(suite, "properties")
        for key, value in asdict(report.header).items():
            ElementTree.SubElement(properties, "property", name=key, value=_text(str(value)))
        for result in results:
            suite.append(_case(result, telemetry.get(result.id)))
    ElementTree.indent(root)
    written: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return written + b"\n"


def _counts(name: str, results: list[Result]) -> dict[str, str]:
    elements = [_ELEMENT.get(result.outcome) for result in results]
    counts = {f"{kind}s": elements.count(kind) for kind in ("failure", "error")}
    return {
        "name": name,
        "tests": str(len(results)),
        **{key: str(count) for key, count in counts.items()},
        "skipped": str(elements.count("skipped")),
    }


def _case(result: Result, told: Telemetry | None) -> ElementTree.Element:
    case = ElementTree.Element("testcase", classname=result.cell or "refusals", name=result.id)
    if told is not None:
        case.set("time", f"{told.seconds:.3f}")
    properties = ElementTree.SubElement(case, "properties")
    for key in ("cell", "kind", "outcome", "margin", "captures", "replays"):
        ElementTree.SubElement(properties, "property", name=key, value=str(getattr(result, key)))
    if (element := _ELEMENT.get(result.outcome)) is not None:
        first = result.reason.strip().partition("\n")[0]
        node = ElementTree.SubElement(case, element, message=_text(f"{result.outcome}: {first}"))
        node.text = _text((told.message if told is not None else "") or result.reason)
    return case


def _text(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)
