"""Which cases a run selects: fnmatch patterns on case ids, a comma means or."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from dsv4_matrix.declaration.model import Case

#: Name of the fixture that makes a test run a case.
FIXTURE = "matrix_case"


class SelectionError(ValueError):
    """A pattern that selects nothing; the message shows ids near it."""


def select(cases: Sequence[Case], expression: str | None) -> tuple[Case, ...]:
    """Those of ``cases`` whose id matches a pattern of ``expression``, in their order; all of them without one.

    Raises:
        SelectionError: no pattern at all, or one that no id matches: a typing mistake must not shrink a run.
    """
    if expression is None:
        return tuple(cases)
    patterns = [pattern.strip() for pattern in expression.split(",") if pattern.strip()]
    if not patterns:
        raise SelectionError(f"no pattern in {expression!r}; give case ids or patterns such as 'r4-cg-decode-*'")
    for pattern in patterns:
        if not any(fnmatchcase(case.id, pattern) for case in cases):
            raise SelectionError(f"no case id matches {pattern!r}; {_near(pattern, [case.id for case in cases])}")
    return tuple(case for case in cases if any(fnmatchcase(case.id, pattern) for pattern in patterns))


def _near(pattern: str, ids: Sequence[str]) -> str:
    # A cell's name, or a pattern of cells: what everybody tries first.
    of_cells = f"{pattern.replace('/', '-').rstrip('*-')}-*"
    if "/" in pattern and any(fnmatchcase(case_id, of_cells) for case_id in ids):
        return f"patterns are of case ids, and those of this cell are {of_cells!r}"
    plain = pattern.replace("*", "").replace("?", "").replace("/", "-").lower()
    near = (
        get_close_matches(plain, ids, n=5, cutoff=0.3) or [case_id for case_id in ids if plain and plain in case_id][:5]
    )
    listed = "see them with 'dsv4-matrix list'"
    return f"near it are {', '.join(near)}; {listed}" if near else listed


def cases_of(items: list[Any]) -> list[tuple[str, str]]:
    """``(case id, node id)`` of the collected items that run a case, in order."""
    found = []
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and FIXTURE in callspec.params:
            found.append((callspec.params[FIXTURE].id, item.nodeid))
    return found
