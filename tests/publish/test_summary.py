"""Markdown for a CI step: the verdict first, nothing that breaks out of its table or its code block."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from markdown_it import MarkdownIt

from dsv4_matrix.declaration.model import Matrix
from dsv4_matrix.report.gaps import gaps
from dsv4_matrix.report.merge import merge
from dsv4_matrix.report.result import Outcome, Report
from dsv4_matrix.report.summary import summary_markdown

Maker = Callable[..., Report]


def made(matrix: Matrix, report: Report, messages: dict[str, str] | None = None) -> str:
    return summary_markdown(matrix, report, gaps(report, matrix), messages or {})


def rendered(text: str) -> str:
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(text)


def test_all_passed(make: Maker, matrix: Matrix) -> None:
    text = made(matrix, make("gpu"))
    total = len(matrix.cases("gpu"))
    assert text.startswith(f"## ✅ dsv4-matrix: {total} of {total} cases passed on Test GPU\n")
    assert "Fell short" not in text
    assert rendered(text).count("<table>") == 1


def test_a_failing_case_has_its_row_and_its_screen(make: Maker, matrix: Matrix, case_id: str) -> None:
    report = make("gpu", change={case_id: {"outcome": Outcome.FAILED, "reason": "worst row 3\nmore", "margin": "7.5"}})
    text = made(matrix, report, {case_id: "case r4\nworst row 3: got 1, want 2"})
    assert text.startswith("## ❌")
    assert f"| `{case_id}` | failed | 7.5 | worst row 3 |" in text
    assert "<code>worst row 3: got 1" not in text
    assert "worst row 3: got 1, want 2" in rendered(text)


def test_a_missing_shard_turns_it_red_and_says_what_is_missing(make: Maker, matrix: Matrix) -> None:
    report = merge([("a", make("gpu", "1/2"))])
    text = made(matrix, report)
    assert text.startswith("## ❌")
    assert "missing, declared for this device but in no report:**\n\n- " in text
    names = gaps(report, matrix).told()[0].names
    assert rendered(text).count("<li>") == len(names)
    assert all(f"<li>{name}</li>" in rendered(text) for name in names)


@pytest.mark.parametrize(
    "hostile", ["a | b", "`code`", "<script>x</script>", "</details>", "[x](y)", "```\nout", "*b*"]
)
def test_hostile_text_stays_text(make: Maker, matrix: Matrix, hostile: str, case_id: str) -> None:
    report = make("gpu", change={case_id: {"outcome": Outcome.ERROR, "reason": hostile}})
    page = rendered(made(matrix, report, {case_id: f"````\n{hostile}\n<b>"}))
    assert "<script>" not in page
    assert "<b>" not in page
    assert "<a " not in page
    assert page.count("<details>") == page.count("</details>") == 1
    rows = page.partition("Fell short")[2].partition("</table>")[0]
    assert rows.count("<td") == 4


def test_many_long_messages_stay_below_githubs_limit(make: Maker, matrix: Matrix) -> None:
    ids = [case.id for case in matrix.cases("gpu")]
    report = make("gpu", change={i: {"outcome": Outcome.ERROR, "reason": "x" * 5_000} for i in ids})
    text = made(matrix, report, dict.fromkeys(ids, "é" * 100_000))
    assert len(text.encode()) < 1024 * 1024
    assert all(f"| `{case_id}` |" in text for case_id in ids)
