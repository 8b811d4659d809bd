"""The own step of a cell, as a probe tries it: it goes through where a cell is covered, on a GPU in a real graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dsv4_triton import DSV4TritonBackend

from dsv4_matrix.declaration import Matrix, find_matrix, load_matrix
from dsv4_matrix.declaration.model import Case, Probe, State
from dsv4_matrix.declaration.sites import OWN_STEP
from dsv4_matrix.modes.probes import ProbeFailed, run_probe


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return load_matrix(find_matrix())


def deferred(matrix: Matrix, cell_id: str, match: str) -> Case:
    probe = Probe(OWN_STEP, "ValueError", match)
    cell = replace(matrix.cell(cell_id), state=State.DEFERRED, variants=(), reason="Not wired up yet.", probe=probe)
    return Case("probe", "probe", cell=cell, probe=probe, reason=cell.reason)


@pytest.mark.parametrize("cell", ["r128/cg-decode", "r4/verify-cg", "r4/eager", "r0/eagle-draft-runner"])
def test_a_covered_cell_called_deferred_fails(matrix: Matrix, device: str, cell: str) -> None:
    with pytest.raises(ProbeFailed, match="went through; a refusal was due"):
        run_probe(deferred(matrix, cell, "not wired up"), matrix, DSV4TritonBackend, device)


@pytest.mark.parametrize("cell", ["r4/de-eager", "r4/de-cg", "r128/eagle-draft-runner"])
def test_a_cell_that_is_refused_may_be_called_deferred(matrix: Matrix, device: str, cell: str) -> None:
    run_probe(deferred(matrix, cell, "SWA-only"), matrix, DSV4TritonBackend, device)
