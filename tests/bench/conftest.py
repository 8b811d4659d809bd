"""Results as a run on an H200 would leave them, with made-up times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from dsv4_matrix.bench.results import (
    LONG_CONTEXT,
    PEER_TABLE,
    Ceilings,
    KernelResources,
    Measurement,
    Results,
    StepMeasurement,
)
from dsv4_matrix.bench.shapes import Shape

C4 = Shape(4, 64, 64, 2, 128, 256, 512, 64)


def measured(shape: Shape, median: float, table: float | None, beside: float | None = None) -> Measurement:
    choice = "portable: the portable kernel is the default"
    return Measurement(shape, median, median - 1, median + 1, 15.0, 13.6, table, beside, choice)


@pytest.fixture
def c4() -> Shape:
    return C4


@pytest.fixture
def result() -> Callable[..., Measurement]:
    return measured


@pytest.fixture
def results() -> Results:
    """Two shapes of the peer's table, a ladder of two rungs, two steps, one kernel."""
    long = dataclasses.replace(C4, extra_topk=1024)
    return Results(
        machine={"kernel": "mine", "gpu": "NVIDIA H200", "triton": "3.6.0"},
        ceilings=Ceilings(4.3e12, 790e12),
        groups={
            PEER_TABLE: [measured(C4, 50.0, 56.1), measured(dataclasses.replace(C4, batch=1), 20.0, 10.0)],
            LONG_CONTEXT: [measured(long, 81.0, None), measured(C4, 50.0, 56.1)],
        },
        planned={PEER_TABLE: 2, LONG_CONTEXT: 2},
        steps=[
            StepMeasurement("metadata", 12.5, "us", at_most=20),
            StepMeasurement("store", 66.0, "%", at_least=70),
        ],
        kernels=[KernelResources("dsv4_triton.store._pack_and_store", "MAPPED=1 ROWS=8", 4, 55, 0, 64)],
        finished=True,
    )
