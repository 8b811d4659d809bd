"""What cells promise about their bits: read, explained, and declared by every covered cell of the repository."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dsv4_matrix.declaration import Matrix, State, read_matrix
from dsv4_matrix.declaration.listing import explain_text
from dsv4_matrix.declaration.model import Level, PrefillBits

COVERED = "  r0/eager:\n    state: covered\n"


def test_a_cell_that_says_nothing_promises_the_same_plan_only(small_matrix: Matrix) -> None:
    cell = small_matrix.cell("r0/eager")
    assert cell.promise is Level.SAME_PLAN
    assert cell.prefill_bits == ()


def test_promises_are_read_and_explained(edited: Callable[..., bytes]) -> None:
    sparse = "sparse: {bitwise: false, first_divergent_kv_len: 65}"
    said = f"    promise: L4\n    prefill_decode_bitwise: {{dense: {{bitwise: true}}, {sparse}}}\n"
    matrix = read_matrix(edited((COVERED, COVERED + said)), "m.yaml")
    cell = matrix.cell("r0/eager")
    assert cell.promise is Level.DEVICE
    assert cell.prefill_bits == (PrefillBits("dense", True), PrefillBits("sparse", False, 65))
    told = explain_text(matrix, "r0/eager")
    assert "promises L4: a row's bits do not depend on its batch" in told
    assert "dense prefill has the bits of decode" in told
    assert "sparse prefill differs from decode in bits, from 65 tokens on" in told
    case = next(case for case in matrix.cases() if case.cell_id == "r0/eager")
    assert "promises L4: a row's bits do not depend on its batch" in explain_text(matrix, case.id)
    probe = next(case for case in matrix.cases() if case.kind != "case")
    assert "promises" not in explain_text(matrix, probe.id)


def test_unknown_is_a_word_of_its_own(edited: Callable[..., bytes]) -> None:
    said = "    prefill_decode_bitwise: {sparse: {bitwise: unknown}}\n"
    matrix = read_matrix(edited((COVERED, COVERED + said)), "m.yaml")
    assert matrix.cell("r0/eager").prefill_bits == (PrefillBits("sparse", None),)
    assert "sparse prefill: unknown" in explain_text(matrix, "r0/eager")


@pytest.mark.parametrize("level", list(Level))
def test_levels_include_those_before(level: Level) -> None:
    assert [level.covers(other) for other in Level] == [other.value <= level.value for other in Level]


def test_every_covered_cell_makes_a_promise(own_matrix: Matrix) -> None:
    for cell in own_matrix.cells:
        if cell.state is State.COVERED:
            assert cell.promise.covers(Level.GRAPH), cell.id
            assert bool(cell.prefill_bits) == (cell.mode == "eager"), cell.id
