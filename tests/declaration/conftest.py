"""A small valid declaration whose lines and columns the tests of mistakes count in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4_matrix.declaration import Matrix, load_matrix, read_matrix

SMALL = """\
schema: 1
geometry: {page_size: 256, head_dim: 512, nope: 448, rope: 64, window: 128, bytes_per_token: 584}
tolerances:
  eager: {atol: 5.0e-2, rtol: 5.0e-2}
  graph: {atol: 1.0e-1, rtol: 1.0e-1}
  budget: {baseline_factor: 2, rounding: 1, mean_rounding: 0.5, cosine: 1.0e-5, lse_factor: 2, lse_rounding: 64}
ratios: [0, 4]
modes:
  eager: {title: Eager, summary: one step after another}
  verify-cg: {title: Verify CG, summary: a captured chain of drafts}
profiles:
  chains:
    - {name: chain, prefix_lens: [64, 96], extend_lens: [3, 3], accept_lens: [1, 2], replays: [[65], [], [66]]}
cells:
  r0/eager:
    state: covered
    variants:
      - {name: extend, forward: extend, prefix_lens: [0], extend_lens: [32]}
      - {name: decode, forward: decode, prefix_lens: [32, 96]}
  r0/verify-cg: {state: covered, profiles: [chains]}
  r4/eager:
    state: deferred
    reason: Ratio 4 is not wired up yet.
    probe: {site: own-step, raises: ValueError, match: invalid compress_ratio}
  r4/verify-cg:
    state: blocked
    reason: Verify needs a selection for each row.
    probe: {site: own-step, raises: ValueError, match: selection}
refusals:
  page-size:
    reason: Pages have 256 tokens.
    probe: {site: page-size, raises: AssertionError, match: page_size=256}
"""

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
