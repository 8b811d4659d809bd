"""The page as text: whole, self-contained, the same for the same reports, and safe from what a message says."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from dsv4_matrix.declaration.model import Matrix
from dsv4_matrix.report.gaps import gaps
from dsv4_matrix.report.html import Told, page
from dsv4_matrix.report.merge import merge
from dsv4_matrix.report.result import Outcome, Report

Maker = Callable[..., Report]
VOID = {"meta", "input", "br", "link", "img"}


class Reader(HTMLParser):
    """Collects elements; fails on a tag that is not closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def told(matrix: Matrix, report: Report, messages: dict[str, str] | None = None) -> Told:
    return Told(report, gaps(report, matrix), messages or {})


def test_every_cell_and_every_case_is_there(make: Maker, matrix: Matrix) -> None:
    reader = Reader(page(matrix, [told(matrix, make("gpu"))]))
    cells = {(a["data-ratio"], a["data-mode"]) for a in reader.all("a")}
    assert cells == {(str(cell.ratio), cell.mode) for cell in matrix.cells}
    assert {li["data-id"] for li in reader.all("li") if "data-id" in li} == {case.id for case in matrix.cases()}


def test_anchors_are_unique_and_links_lead_somewhere(make: Maker, matrix: Matrix) -> None:
    reader = Reader(page(matrix, [told(matrix, make("gpu")), told(matrix, make("cpu"))]))
    ids = Counter(attributes["id"] for _, attributes in reader.elements if "id" in attributes)
    assert set(ids.values()) == {1}
    assert all((a["href"] or "").removeprefix("#") in ids for a in reader.all("a"))


def test_nothing_comes_from_a_network(make: Maker, matrix: Matrix) -> None:
    text = page(matrix, [told(matrix, make("gpu"))])
    reader = Reader(text)
    assert not any({"src", "srcset", "action"} & attributes.keys() for _, attributes in reader.elements)
    assert not reader.all("link")
    assert not re.search(r"https?://|url\(|@import", text)
    assert "default-src 'none'" in text


def test_the_same_reports_give_the_same_page(make: Maker, matrix: Matrix) -> None:
    one = page(matrix, [told(matrix, make("gpu"))])
    merged = merge([(str(k), make("gpu", f"{k}/3")) for k in (3, 1, 2)])
    assert page(matrix, [told(matrix, merged)]) == one


def test_what_a_message_says_stays_text(make: Maker, matrix: Matrix, case_id: str) -> None:
    hostile = "</pre></li><script>alert(1)</script><img src=x onerror=alert(1)> & \" ' ${x} $style"
    report = make("gpu", change={case_id: {"outcome": Outcome.ERROR, "reason": hostile}})
    text = page(matrix, [told(matrix, report, {case_id: hostile})])
    reader = Reader(text)
    assert len(reader.all("script")) == 1
    assert not reader.all("img")
    assert "&lt;img src=x onerror=alert(1)&gt; &amp; &quot; &#x27; ${x} $style" in text


def test_the_verdict_counts_what_is_missing(make: Maker, matrix: Matrix) -> None:
    half = make("gpu", "1/2")
    total = len(matrix.cases("gpu"))
    passed = sum(result.outcome is Outcome.PASSED for result in half.results)
    text = page(matrix, [told(matrix, half)])
    assert f"{passed} of {total} cases passed on Test GPU" in text
    assert " missing, declared for this device but in no report:</p>\n" in text
    (gap,) = gaps(half, matrix).told()
    assert f'<p class="facts">{", ".join(gap.names)}</p>' in text
    assert 'class="verdict good"' not in text
    assert 'class="verdict good"' in page(matrix, [told(matrix, make("gpu"))])


@pytest.mark.parametrize(
    ("margin", "style"), [("0.05", "h0"), ("0.10", "h1"), ("0.99", "h9"), ("1.0", "h9"), ("inf", "h9"), ("nan", "h9")]
)
def test_heat_follows_the_worst_margin(make: Maker, matrix: Matrix, case_id: str, margin: str, style: str) -> None:
    others = [case.id for case in matrix.cases() if case.cell_id == "r4/cg-decode"]
    change = {case: {"margin": "0.01"} for case in others} | {case_id: {"margin": margin}}
    text = page(matrix, [told(matrix, make("gpu", change=change))])
    assert f'<a class="{style}" href="#c0-{min(others)}" data-ratio="4" data-mode="cg-decode"' in text


def test_a_refusal_that_does_not_hold_is_short(make: Maker, matrix: Matrix) -> None:
    text = page(matrix, [told(matrix, make("gpu", change={"r0-pcg-extend-refused": {"outcome": Outcome.FAILED}}))])
    assert re.search(r'class="short" href="#c0-r0-pcg-extend-refused".*?not-applicable, refusal failed', text)


def test_no_report_or_one_device_twice_is_refused(make: Maker, matrix: Matrix) -> None:
    with pytest.raises(ValueError, match="got none"):
        page(matrix, [])
    with pytest.raises(ValueError, match="got Test GPU, triton, Test GPU, triton"):
        page(matrix, [told(matrix, make("gpu", "1/2")), told(matrix, make("gpu", "2/2"))])
