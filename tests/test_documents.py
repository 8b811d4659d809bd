"""Links lead somewhere, documented commands exist, and the README says what messages and variants mean."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsv4_matrix.cases.queries import sinks
from dsv4_matrix.cli import main
from dsv4_matrix.declaration.model import Case, Variant
from dsv4_matrix.execution import draws, on_screen, together
from dsv4_matrix.report.result import Outcome

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    broken = [link for link in LINK.findall(document.read_text()) if not (document.parent / link).exists()]
    assert broken == []


def test_every_decision_is_listed() -> None:
    listed = set(LINK.findall((ROOT / "docs/index.md").read_text()))
    assert {f"decisions/{path.name}" for path in (ROOT / "docs/decisions").glob("*.md")} <= listed
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"} <= listed


@pytest.mark.parametrize("command", sorted(set(re.findall(r"dsv4-matrix ([a-z]+)", (ROOT / "README.md").read_text()))))
def test_commands_of_the_readme_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0


def test_the_readme_says_what_a_variant_has_that_tells_nothing() -> None:
    """``no sink`` stands nowhere in the table, so that a plain variant reads as if it had one."""
    plain = Variant("plain", "decode", (64,))
    told = " ".join((ROOT / "README.md").read_text().partition("<!-- matrix:begin -->")[0].split())
    sink = f"no sink (`sink: {plain.sink}`, an `attn_sink` of {sinks(plain.sink, 1, 0)[0]:.0e})".replace("e+", "e")
    usual = f"the usual: {plain.heads} heads, {sink}, SWA page {plain.swa_page_size}, top-k {plain.index_topk}, "
    assert f"{usual}{plain.pages} pages, {plain.history} history, {plain.q_layout} q." in told


def test_the_readme_names_the_lines_that_end_a_message() -> None:
    """Of a draw the last line is another than of a case, so neither is called the last."""
    case = Case("r0-eager-a", "case", variant=Variant("a", "decode", (64,)))
    passed, failed = (
        on_screen(drawn, "mine:Backend", "CPU", outcome, "told")
        for drawn, outcome in zip(draws(case, 2), (Outcome.PASSED, Outcome.FAILED), strict=True)
    )
    section = " ".join((ROOT / "README.md").read_text().partition("## When a case fails")[2].split())
    labels = [line.split()[0] for line in together(passed, failed).message.splitlines()[-2:]]
    assert labels == ["run", "draw"]
    assert all(f"`{label}` line" in section for label in labels)
    assert "The last line" not in section
    assert "If the case passes alone, your backend keeps state from an earlier case in the same process" in section
