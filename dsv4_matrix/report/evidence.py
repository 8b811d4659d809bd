"""Evidence as Markdown: what was proven on each device, and whether it still speaks about these sources.

A device without a file in the folder is not mentioned: nothing is known about it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from dsv4_matrix.declaration.model import Matrix
from dsv4_matrix.report.canonical import ReportError, read
from dsv4_matrix.report.fingerprint import fingerprint
from dsv4_matrix.report.gate_evidence import gate_markdown
from dsv4_matrix.report.kernels import declared_kernels
from dsv4_matrix.report.result import Outcome, Report, Result
from dsv4_matrix.report.table import matrix_table, worst_margin
from dsv4_matrix.report.telemetry import SUFFIX


def evidence_markdown(matrix: Matrix, folder: Path) -> str:
    """A table of devices, then for each the matrix of what was proven; ends with a newline.

    Raises:
        ReportError: a file in ``folder`` is no canonical report, or ``folder`` is a file; the message names the place.
    """
    if folder.exists() and not folder.is_dir():
        raise ReportError(f"{folder}: is not a folder of reports")
    paths = sorted(path for path in folder.glob("*.jsonl") if not path.name.endswith(SUFFIX))
    reports = [(path, read(path)) for path in paths]
    if not reports:
        return "No evidence is recorded yet: `dsv4-matrix run --record evidence` on a machine records it.\n"
    here = fingerprint(Path(matrix.path))
    rows = [_row(report, currency(report, matrix, here)) for _, report in reports]
    heads = ["device", "backend", "torch, triton", "cases passed", "refusals seen", "worst margin", "graphs", "sources"]
    parts = [tabulate(rows, headers=heads, tablefmt="github", disable_numparse=True)]
    parts.append(gate_markdown(matrix, folder, [report.header.device_model for _, report in reports]))
    parts += [
        f"{_heading(report)}:\n\n{matrix_table(matrix, report.results, 'github', graphs=True)}" for _, report in reports
    ]
    return "\n\n".join([*parts, _LEGEND]) + "\n"


def currency(report: Report, matrix: Matrix, here: str) -> str:
    """``current``, or why the report says nothing about the sources with fingerprint ``here``."""
    if report.header.matrix_sha256 != matrix.sha256:
        return "not current: recorded with another matrix.yaml"
    if report.header.fingerprint != here:
        return "not current: recorded on other sources"
    if not report.header.kernels and declared_kernels(report.header.backend):
        return "not current: does not tell which kernels served"
    if missing := {case.id for case in matrix.cases()} - {result.id for result in report.results}:
        return f"not current: {len(missing)} declared cases are missing"
    return "current"


_LEGEND = (
    "Cells: passed/declared cases and their worst error over budget, then graph captures and compared replays. "
    "Only what is marked current was recorded on exactly these sources and this matrix.yaml. The gate's level is what "
    "its two runs differed in; rows are compared bit for bit (docs/guarantees.md)."
)


def _heading(report: Report) -> str:
    kernels = f", kernels: {report.header.kernels}" if report.header.kernels else ""
    return f"{report.header.device_model}{kernels}"


def _row(report: Report, current: str) -> list[str]:
    header = report.header
    cases = [result for result in report.results if result.kind == "case"]
    others = [result for result in report.results if result.kind != "case"]
    return [
        header.device_model,
        header.backend,
        f"{header.torch}, {header.triton or 'none'}",
        _share(cases),
        _share(others),
        worst_margin(cases),
        f"{sum(r.captures for r in cases)} captured, {sum(r.replays for r in cases)} replayed",
        current,
    ]


def _share(results: Sequence[Result]) -> str:
    counts = Counter(result.outcome for result in results)
    ran = len(results) - counts[Outcome.NOT_RUN]
    text = f"{counts[Outcome.PASSED]}/{ran}"
    return f"{text} ({counts[Outcome.NOT_RUN]} not run)" if counts[Outcome.NOT_RUN] else text
