"""Links between documents lead somewhere, and the documented commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsv4_matrix.cli import main

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
