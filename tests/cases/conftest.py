from collections.abc import Callable
from typing import Any

import pytest

from dsv4_matrix.cases.build import build_scenario
from dsv4_matrix.cases.scenario import Scenario
from dsv4_matrix.declaration import Case, Cell, Matrix, State, Variant, find_matrix, load_matrix


@pytest.fixture(scope="session")
def matrix() -> Matrix:
    return load_matrix(find_matrix())


@pytest.fixture(scope="session")
def make_case() -> Callable[..., Case]:
    """``make_case(ratio, mode, forward, prefix_lens, **variant)``: a case that no matrix declares."""

    def make(ratio: int, mode: str, forward: str, prefix_lens: tuple[int, ...], **given: Any) -> Case:
        variant = Variant(name="made", forward=forward, prefix_lens=prefix_lens, **given)
        cell = Cell(ratio, mode, State.COVERED, (variant,))
        return Case(f"r{ratio}-{mode}-made", "case", cell, variant)

    return make


@pytest.fixture(scope="session")
def make(make_case: Callable[..., Case], matrix: Matrix) -> Callable[..., Scenario]:
    """The scenario of such a case, on the CPU."""
    return lambda *args, **given: build_scenario(make_case(*args, **given), matrix, "cpu")
