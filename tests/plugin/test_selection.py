"""Patterns on case ids."""

from __future__ import annotations

import pytest

from dsv4_matrix.declaration.model import Case
from dsv4_matrix.selection import SelectionError, select

CASES = tuple(Case(id=name, kind="case") for name in ("r0-eager-a", "r0-eager-b", "r4-cg-decode-a", "refusal-head-dim"))


@pytest.mark.parametrize(
    ("expression", "ids"),
    [
        (None, ["r0-eager-a", "r0-eager-b", "r4-cg-decode-a", "refusal-head-dim"]),
        ("*", ["r0-eager-a", "r0-eager-b", "r4-cg-decode-a", "refusal-head-dim"]),
        ("r4-*,r0-*-b", ["r0-eager-b", "r4-cg-decode-a"]),
        (" r0-eager-? ,", ["r0-eager-a", "r0-eager-b"]),
        ("r[4]-*", ["r4-cg-decode-a"]),
        ("*-a,r0-eager-a", ["r0-eager-a", "r4-cg-decode-a"]),
    ],
)
def test_patterns(expression: str | None, ids: list[str]) -> None:
    assert [case.id for case in select(CASES, expression)] == ids


@pytest.mark.parametrize("expression", ["", " , "])
def test_no_pattern_is_a_mistake(expression: str) -> None:
    with pytest.raises(SelectionError, match="no pattern in"):
        select(CASES, expression)


@pytest.mark.parametrize(
    ("expression", "near"),
    [
        ("r0-eager-*,r4/cg-decode", r"no case id matches 'r4/cg-decode'; .* this cell are 'r4-cg-decode-\*'$"),
        ("r4/*", r"are 'r4-\*'$"),
        ("r4/cg-dec", "near it are r4-cg-decode-a"),
        ("R0-EAGER-A", "near it are r0-eager-a"),
        ("zzz", "list'"),
    ],
)
def test_each_pattern_must_match(expression: str, near: str) -> None:
    with pytest.raises(SelectionError, match=near):
        select(CASES, expression)
