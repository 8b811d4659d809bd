"""The declared matrix seen by the judge: every kind of mistake has a case in every covered cell."""

from pathlib import Path

import pytest

from dsv4_matrix.cases.build import build_scenario
from dsv4_matrix.declaration import load_matrix
from dsv4_matrix.judge import Kind, applicable_kinds

MATRIX = load_matrix(Path(__file__).parents[2] / "matrix.yaml")
COVERED = [cell.id for cell in MATRIX.cells if cell.variants]


@pytest.mark.parametrize("cell_id", COVERED)
def test_a_covered_cell_can_fail_in_every_way(cell_id):
    cell = MATRIX.cell(cell_id)
    wanted = set(Kind) if cell.ratio else set(Kind) - {Kind.EARLY}
    kinds: set[Kind] = set()
    for case in MATRIX.cases("cpu"):
        if case.kind == "case" and case.cell_id == cell_id:
            kinds |= applicable_kinds(build_scenario(case, MATRIX, "cpu"))
    assert kinds == wanted, f"{cell_id} has no case on the CPU that can see: {sorted(wanted - kinds)}"
