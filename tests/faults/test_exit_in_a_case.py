"""A backend that ends in SystemExit while a case runs: the error of that case, and neither the run's end nor a dump."""

from __future__ import annotations

from typing import Any

import pytest
from dsv4_triton import DSV4TritonBackend

from dsv4_matrix.context import Context, Options
from dsv4_matrix.execution import Execution, Setup, execute
from dsv4_matrix.loading import Backend, CheckedFactory
from dsv4_matrix.report.result import Outcome


class Leaves(DSV4TritonBackend):
    def forward(self, *arguments: Any) -> Any:
        raise SystemExit("bye")


class LeavesAtOnce(DSV4TritonBackend):
    def __init__(self, *arguments: Any) -> None:
        raise SystemExit("bye")


class Interrupted(DSV4TritonBackend):
    def forward(self, *arguments: Any) -> Any:
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def setup() -> Setup:
    return Context(Options.of_command()).setup


def run(setup: Setup, case_id: str, backend: type) -> Execution:
    name = f"mine:{backend.__name__}"
    changed = Setup(setup.matrix, setup.machine, Backend(name, CheckedFactory(name, backend)), setup.reference)
    return execute(next(case for case in setup.matrix.cases() if case.id == case_id), changed)


@pytest.mark.parametrize("case_id", ["r0-eager-decode-idle", "refusal-page-size"], ids=["case", "probe"])
def test_it_is_an_error_in_the_form_of_others(setup: Setup, case_id: str) -> None:
    done = run(setup, case_id, Leaves)
    assert done.result.outcome is Outcome.ERROR
    assert done.result.reason == "backend raised in the case: SystemExit: bye"
    first, reason, frame, seed, again = done.message.splitlines()
    assert first == f"{case_id}: error on mine:Leaves (CPU interpreter)"
    assert reason == "  backend raised in the case: SystemExit: bye"
    line = Leaves.forward.__code__.co_firstlineno + 1
    assert frame == f'    faults/test_exit_in_a_case.py:{line} in forward: raise SystemExit("bye")'
    assert seed.startswith("  seed     ")
    assert again == f"  run      dsv4-matrix run --cells {case_id} --backend mine:Leaves"


def test_one_at_construction_has_the_leg_and_the_place(setup: Setup) -> None:
    done = run(setup, "r0-eager-decode-idle", LeavesAtOnce)
    assert done.result.outcome is Outcome.ERROR
    assert done.result.reason.startswith("backend raised in eager leg, building the backend: LoadError: ")
    assert "its construction does not return: it ended in SystemExit('bye') (" in done.result.reason
    assert f"test_exit_in_a_case.py:{LeavesAtOnce.__init__.__code__.co_firstlineno + 1})" in done.result.reason


def test_an_interrupt_stays_one(setup: Setup) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(setup, "r0-eager-decode-idle", Interrupted)
