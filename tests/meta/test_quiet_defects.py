"""Defects that show only beyond a size or a magnitude are seen on a CPU too, each by the case meant for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4_matrix.declaration import find_matrix, load_matrix
from dsv4_matrix.execution import Setup, execute
from dsv4_matrix.loading import load_backend, load_reference
from dsv4_matrix.machine import find_machine
from dsv4_matrix.report.result import Outcome

HERE = Path(__file__).parent
MATRIX = load_matrix(find_matrix())
CASES = {case.id: case for case in MATRIX.cases()}
CAUGHT = {
    "NoRunningMaximum": "r0-eager-decode-within-window",
    "Unscaled": "r0-eager-decode-multi-request",
    "AllScaledAlike": "r0-eager-extend-ragged",
    "FirstTileOfRows": "r0-eager-extend-ragged",
    "ThirtyTwoRequests": "r0-eager-decode-many-requests",
    "SelectionCutAt512": "r4-eager-decode-heads-16",
    "C128EntriesCutAt512": "r128-eager-decode-heads-16",
    "LengthsIn16Bits": "r128-eager-decode-heads-16",
}


@pytest.mark.parametrize("defect", CAUGHT)
def test_seen(defect: str) -> None:
    setup = Setup(MATRIX, find_machine(), load_backend(f"quiet_defects:{defect}", HERE), load_reference())
    case = CASES[CAUGHT[defect]]
    assert "cpu" in case.variant.devices
    assert execute(case, setup).result.outcome is Outcome.FAILED


@pytest.mark.parametrize("case_id", sorted(set(CAUGHT.values())))
def test_not_without_the_defect(case_id: str) -> None:
    setup = Setup(MATRIX, find_machine(), load_backend("toy_backend:ToyBackend", HERE), load_reference())
    assert execute(CASES[case_id], setup).message == ""
