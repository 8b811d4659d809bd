"""Writes the project of somebody else over ``matrix_case``: a run of the real plugin takes milliseconds in it."""

from __future__ import annotations

from pathlib import Path

import pytest

_BASE = Path(__file__).with_name("stub_base.py").read_text(encoding="utf-8")
_CASES = """
def test_cell(matrix_case):
    matrix_case.execute()
"""


def write_project(pytester: pytest.Pytester, stub: str, addopts: str) -> None:
    """Module ``stub`` (``stub_base`` and then the given text), a test over all cases, and an ini file that names both.

    ``addopts`` are of the ini file.
    """
    pytester.makepyfile(stub=f"{_BASE}\n\n{stub}", conftest="import stub", test_mine=_CASES)
    pytester.makeini(
        f"[pytest]\nmatrix_backend = stub:Backend\nmatrix_reference = stub:reference\naddopts = {addopts}\n"
    )
