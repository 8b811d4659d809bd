"""A small valid declaration whose lines and columns the tests of mistakes count in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from small_matrix import SMALL

from dsv4_matrix.declaration import Matrix, load_matrix, read_matrix

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def small() -> str:
    """The text of a valid declaration with two ratios and two modes."""
    return SMALL


@pytest.fixture
def small_matrix() -> Matrix:
    return read_matrix(SMALL.encode(), "small.yaml")


@pytest.fixture
def edited() -> Callable[..., bytes]:
    """``edited(old, new)``: the small declaration with one passage replaced, which must occur exactly once."""

    def edit(*replacements: tuple[str, str]) -> bytes:
        text = SMALL
        for old, new in replacements:
            assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
            text = text.replace(old, new)
        return text.encode()

    return edit


@pytest.fixture(scope="session")
def own_matrix() -> Matrix:
    """The repository's own matrix.yaml."""
    return load_matrix(REPOSITORY / "matrix.yaml")
