"""The page in a real browser: it renders, filters, fits a phone, reads well in both colour schemes, offline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4_matrix.declaration.model import Matrix
from dsv4_matrix.report.gaps import gaps
from dsv4_matrix.report.html import Told, page
from dsv4_matrix.report.result import Outcome, Report

Maker = Callable[..., Report]
MESSAGE = "worst row 3: got 1, want 2 <script>document.title = 'broken out'</script>"


@pytest.fixture
def report_page(make: Maker, matrix: Matrix, case_id: str, tmp_path: Path) -> Path:
    gpu = make("gpu", change={case_id: {"outcome": Outcome.FAILED, "reason": "worst row 3", "margin": "7.5"}})
    cpu = make("cpu")
    written = page(matrix, [Told(gpu, gaps(gpu, matrix), {case_id: MESSAGE}), Told(cpu, gaps(cpu, matrix))])
    path = tmp_path / "report.html"
    path.write_text(written, encoding="utf-8")
    return path


def shown(browser: Any) -> list[str]:
    ids: list[str] = browser.run("rows.filter(row => row.checkVisibility()).map(row => row.dataset.id)")
    return ids


def choose(browser: Any, name: str, value: str) -> None:
    browser.run(
        f"field('{name}').value = '{value}'; field('{name}').dispatchEvent(new Event('input', {{bubbles: true}}))"
    )


def test_opens_without_a_network_or_a_complaint(browser: Any, report_page: Path) -> None:
    browser.open(report_page)
    assert browser.requests == [report_page.as_uri()]
    assert browser.problems == []
    assert browser.run("document.title").startswith("DeepSeek-V4 attention matrix: Test GPU, triton")
    assert browser.run("document.querySelectorAll('script').length") == 1


def test_failing_cases_come_first_and_open_with_their_message(browser: Any, report_page: Path, case_id: str) -> None:
    browser.open(report_page)
    assert shown(browser)[0] == case_id
    assert browser.run("rows[0].querySelector('pre').checkVisibility()")
    assert browser.run("rows[0].querySelector('pre').innerText") == MESSAGE


def test_filters_narrow_the_list_and_say_so(browser: Any, report_page: Path, matrix: Matrix, case_id: str) -> None:
    browser.open(report_page)
    everything = len(shown(browser))
    assert everything == 2 * len(matrix.cases())
    choose(browser, "outcome", "short")
    assert shown(browser) == [case_id]
    assert browser.run("count.textContent") == f"1 of {everything} cases shown"
    choose(browser, "outcome", "")
    choose(browser, "ratio", "128")
    choose(browser, "mode", "verify-cg")
    assert {i.rpartition("r128-verify-cg-")[0] for i in shown(browser)} == {""}
    choose(browser, "device", "CPU interpreter, triton")
    assert len(shown(browser)) == len(matrix.cell("r128/verify-cg").variants)
    browser.click("button[type=reset]")
    assert browser.run("new Promise(done => setTimeout(() => done(count.textContent)))").startswith(str(everything))


def test_typing_in_the_search_field_filters(browser: Any, report_page: Path, case_id: str) -> None:
    browser.open(report_page)
    browser.click("#f-text")
    browser.write(case_id.upper())
    assert shown(browser) == [case_id, case_id]


def test_choosing_a_cell_shows_its_cases(browser: Any, report_page: Path, matrix: Matrix) -> None:
    browser.open(report_page)
    browser.click("td a[data-ratio='4'][data-mode='cg-decode']")
    found = shown(browser)
    assert len(found) == len(matrix.cell("r4/cg-decode").variants)
    assert all(i.startswith("r4-cg-decode-") for i in found)
    assert browser.run("document.getElementById('cases').getBoundingClientRect().top < innerHeight")


def test_works_by_keyboard_alone(browser: Any, report_page: Path) -> None:
    browser.open(report_page)
    browser.press("Tab")
    assert browser.run("document.activeElement.matches('td a')")
    assert browser.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.press("Enter")
    assert browser.run("document.activeElement.closest('.cases > li') !== null")


def test_every_field_has_a_label_and_the_count_is_announced(browser: Any, report_page: Path) -> None:
    browser.open(report_page)
    fields = "[...document.querySelectorAll('input, select')]"
    assert browser.run(f"{fields}.length") == 5
    assert browser.run(f"{fields}.every(f => f.labels.length === 1 && f.labels[0].innerText.trim())")
    assert browser.run("document.getElementById('count').getAttribute('role')") == "status"
    assert browser.run("[...document.querySelectorAll('th')].every(th => ['row', 'col'].includes(th.scope))")


@pytest.mark.parametrize("width", [320, 390, 768])
def test_fits_a_phone_without_scrolling_sideways(browser: Any, report_page: Path, width: int) -> None:
    browser.open(report_page, width=width, height=844)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("innerWidth") == width
    small = "[...document.querySelectorAll('td a, select, button')].filter(e => e.getBoundingClientRect().height < 40)"
    assert browser.run(f"{small}.length") == 0, "too small for a finger"


CONTRAST = """
(() => {
  const paint = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgb = colour => {
    paint.fillStyle = colour;
    paint.fillRect(0, 0, 1, 1);
    return [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3).map(value => value / 255);
  };
  const light = colour => {
    const part = rgb(colour).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * part[0] + .7152 * part[1] + .0722 * part[2];
  };
  const behind = e => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (colour !== 'rgba(0, 0, 0, 0)') return colour;
    }
    return 'white';
  };
  let worst = [99, ''];
  for (const style of [...Array(10).keys()].map(k => 'h' + k).concat('short', 'idle')) {
    document.querySelector('td a').className = style;
    const others = document.querySelectorAll('.verdict, .facts, .outcome, .more, .legend, pre, h1');
    for (const e of [document.querySelector('td a b'), ...others]) {
      const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
      const ratio = (a + .05) / (b + .05);
      if (ratio < worst[0]) worst = [ratio, style + ' ' + e.className + ' ' + e.tagName];
    }
  }
  return worst;
})()
"""


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_contrast_on_every_colour(browser: Any, report_page: Path, dark: bool) -> None:
    browser.open(report_page, dark=dark)
    ratio, where = browser.run(CONTRAST)
    assert ratio >= 4.5, where


def test_dark_is_dark(browser: Any, report_page: Path) -> None:
    colours = []
    for dark in (False, True):
        browser.open(report_page, dark=dark)
        colours.append(browser.run("getComputedStyle(document.body).backgroundColor"))
    assert colours[0] != colours[1]


def test_an_injected_handler_would_be_stopped_by_the_policy(browser: Any, report_page: Path) -> None:
    """The second line of defence: markup that got past escaping still runs nothing."""
    report_page.write_text(
        report_page.read_text("utf-8").replace("<h1>", "<img src=x onerror=\"document.title='ran'\"><h1>"), "utf-8"
    )
    browser.open(report_page)
    browser.run("new Promise(done => setTimeout(done, 200))")
    assert browser.run("document.title") != "ran"
    assert any("Content Security Policy" in problem for problem in browser.problems)


def test_complete_without_its_script(browser: Any, report_page: Path, matrix: Matrix) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(report_page)
        visible = browser.run("[...document.querySelectorAll('.cases > li')].filter(e => e.checkVisibility()).length")
        assert visible == 2 * len(matrix.cases())
        assert browser.run("document.getElementById('filters').checkVisibility()") is False
        assert browser.run("document.getElementById('count').innerText") == f"{visible} cases"
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
