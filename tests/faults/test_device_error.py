"""A case after which the device is broken: the error, and in one line what had been found before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dsv4_triton import DSV4TritonBackend

from dsv4_matrix.context import Context, Options
from dsv4_matrix.execution import Execution, Setup, execute, with_device_error
from dsv4_matrix.loading import Backend
from dsv4_matrix.report.result import Outcome

CASE_ID = "r0-eager-decode-boundaries"
SAID = "AcceleratorError: CUDA error: unspecified launch failure"


@pytest.fixture(scope="module")
def setup() -> Setup:
    return Context(Options.of_command()).setup


def told(setup: Setup, change: Callable[[Any, Any], Any] = lambda out, lse: (out, lse)) -> tuple[Execution, list[str]]:
    """What a backend with changed answers is told, and lines of the screen when the device is broken afterwards."""

    class Backs(DSV4TritonBackend):
        def forward(self, *arguments: Any) -> Any:
            return change(*super().forward(*arguments))

    changed = Setup(setup.matrix, setup.machine, Backend("mine:Backs", Backs), setup.reference)
    case = next(case for case in setup.matrix.cases() if case.id == CASE_ID)
    before = execute(case, changed)
    after = with_device_error(before, case, changed, SAID)
    assert after.result.outcome is Outcome.ERROR
    return before, after.message.splitlines()


def test_a_case_that_had_passed_is_told_no_more_than_the_error(setup: Setup) -> None:
    before, lines = told(setup)
    assert before.result.outcome is Outcome.PASSED
    assert lines[:2] == [
        f"{CASE_ID}: error on mine:Backs (CPU interpreter)",
        f"  after the case the device reported {SAID}",
    ]
    assert [line.split()[0] for line in lines[2:]] == ["seed", "run"]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda out, lse: (out + 1, lse), 'failed, leg "eager", step 0, ratio 0'),
        (lambda out, lse: (out, lse[:, None]), "failed, eager leg, step 0: lse must be torch.float32 ["),
    ],
)
def test_what_had_been_found_is_one_line_in_which_the_case_is_not_named_again(
    setup: Setup, change: Callable[[Any, Any], Any], found: str
) -> None:
    before, lines = told(setup, change)
    assert before.result.outcome is Outcome.FAILED
    assert lines[2].startswith(f"  before that: {found}")
    assert [line.split()[0] for line in lines[3:]] == ["seed", "run"]
    assert "\n".join(lines).count("mine:Backs") == 2  # the headline and the command


def test_an_error_of_the_backend_stays_as_it_is(setup: Setup) -> None:
    def broken(out: torch.Tensor, lse: torch.Tensor) -> None:
        raise RuntimeError("of its own")

    before, lines = told(setup, broken)
    assert before.message.splitlines() == lines
    assert "RuntimeError: of its own" in before.message
