"""Every case of the matrix, one test each: built, driven and judged, or probed for its refusal."""

from __future__ import annotations

from dsv4_matrix.plugin import MatrixCase


def test_cell(matrix_case: MatrixCase) -> None:
    __tracebackhide__ = True
    matrix_case.execute()
