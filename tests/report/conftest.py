"""Results and a small matrix to report on."""

from __future__ import annotations

import pytest

from dsv4_matrix.declaration.model import (
    Budget,
    Cell,
    Geometry,
    Matrix,
    Mode,
    Probe,
    Refusal,
    State,
    Tolerance,
    Tolerances,
    Variant,
)
from dsv4_matrix.report.result import Header, Outcome, Report, Result

PROBE = Probe("page-size", "AssertionError", "page")


@pytest.fixture
def matrix() -> Matrix:
    """Two ratios, two modes, two covered cells (one with a variant for GPUs only), one refusal outside them."""

    def variant(name: str, *devices: str) -> Variant:
        return Variant(name=name, forward="decode", prefix_lens=(64,), devices=devices or ("cpu", "gpu"))

    return Matrix(
        path=__file__,
        sha256="ab" * 32,
        geometry=Geometry(256, 512, 448, 64, 128, 584),
        tolerances=Tolerances(Tolerance(5e-2, 5e-2), Tolerance(1e-1, 1e-1), Budget(2.0, 1.0, 1.0, 1e-5, 2.0, 8.0)),
        ratios=(0, 4),
        modes=(Mode("eager", "Eager", ""), Mode("cg-decode", "CG decode", "")),
        cells=(
            Cell(0, "eager", State.COVERED, (variant("a"), variant("b"))),
            Cell(4, "eager", State.DEFERRED, reason="later", probe=PROBE),
            Cell(0, "cg-decode", State.COVERED, (variant("small"), variant("huge", "gpu"))),
            Cell(4, "cg-decode", State.NOT_APPLICABLE, reason="never", probe=PROBE),
        ),
        refusals=(Refusal("head-dim", "only 512", PROBE),),
    )


@pytest.fixture
def header() -> Header:
    return Header("ab" * 32, "cd" * 32, "triton", "NVIDIA H200", "2.11.0", "3.6.0")


@pytest.fixture
def report(header: Header) -> Report:
    """A complete run on a device that does not run ``huge``."""
    return Report(
        header,
        (
            Result("r0-cg-decode-huge", "r0/cg-decode", "case", Outcome.NOT_RUN, "declared for gpu only"),
            Result("r0-cg-decode-small", "r0/cg-decode", "case", Outcome.PASSED, "", "0.31", 1, 4),
            Result("r0-eager-a", "r0/eager", "case", Outcome.PASSED, "", "0.62"),
            Result("r0-eager-b", "r0/eager", "case", Outcome.FAILED, "worst at row 3: ü", "12"),
            Result("r4-cg-decode-refused", "r4/cg-decode", "probe", Outcome.PASSED),
            Result("r4-eager-refused", "r4/eager", "probe", Outcome.PASSED),
            Result("refusal-head-dim", "", "refusal", Outcome.PASSED),
        ),
    )
