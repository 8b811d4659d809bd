"""A report as Markdown for GITHUB_STEP_SUMMARY: the verdict, the matrix, and what fell short."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence

from dsv4_matrix.declaration.model import Matrix
from dsv4_matrix.report.gaps import Gap, Gaps
from dsv4_matrix.report.ledger import fell_short
from dsv4_matrix.report.result import Outcome, Report, Result
from dsv4_matrix.report.table import matrix_table, refusals_text

#: GitHub refuses a step summary above 1 MiB; messages beyond this are named only.
_FULL_MESSAGES = 25
_MESSAGE_LENGTH = 8_000


def summary_markdown(
    matrix: Matrix, report: Report, gaps: Gaps, messages: Mapping[str, str], title: str = "dsv4-matrix"
) -> str:
    """Markdown, ending in a newline; the same for the same report.

    Args:
        matrix: the declaration that the report was made with.
        report: a run's or a merged report.
        gaps: what it lacks.
        messages: one screen for cases that did not pass, by id; the report's reason stands in for a missing one.
        title: of the first heading.
    """
    short = fell_short(report.results)
    passed = sum(result.outcome is Outcome.PASSED for result in report.results)
    total = passed + len(short) + len(gaps.missing)
    good = passed == total and total > 0 and not gaps.undeclared
    header = report.header
    parts = [
        f"## {'✅' if good else '❌'} {_cell(title)}: {passed} of {total} cases passed on {_cell(header.device_model)}",
        f"Backend `{_code(header.backend)}`, torch {_cell(header.torch)}, triton {_cell(header.triton or 'none')}, "
        f"matrix.yaml `{header.matrix_sha256[:12]}`, sources `{header.fingerprint[:12]}`."
        + (f" Kernels: {_cell(header.kernels)}." if header.kernels else ""),
        *(_gap(gap) for gap in gaps.told()),
        matrix_table(matrix, report.results, "github"),
        _cell(refusals_text(report.results)) + ".",
    ]
    if short:
        parts += ["### Fell short", _table(short), *(_screen(result, messages) for result in short[:_FULL_MESSAGES])]
    return "\n\n".join(parts) + "\n"


def _gap(gap: Gap) -> str:
    return "\n".join([f"**{_cell(gap.head)}:**", "", *(f"- {_cell(name)}" for name in gap.names)])


def _table(short: Sequence[Result]) -> str:
    rows = ["| case | outcome | error/budget | reason |", "|:--|:--|--:|:--|"]
    rows += [
        f"| `{result.id}` | {result.outcome} | {_cell(result.margin)} | {_cell(_first_line(result.reason))} |"
        for result in short
    ]
    return "\n".join(rows)


def _screen(result: Result, messages: Mapping[str, str]) -> str:
    text = messages.get(result.id) or result.reason
    if len(text) > _MESSAGE_LENGTH:
        text = text[:_MESSAGE_LENGTH] + "\n… cut; the whole message is in the report"
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"<details><summary><code>{result.id}</code></summary>\n\n{fence}text\n{text}\n{fence}\n\n</details>"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]


def _code(text: str) -> str:
    return text.replace("`", "'").replace("\n", " ")


def _cell(text: str) -> str:
    """``text`` so that Markdown and HTML show it as it is, on one line, also inside a table."""
    escaped = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*_\[\]|~])", r"\\\1", escaped)
