"""A backend that ends in SystemExit while a case runs: the error of that case, and neither the run's end nor a dump."""

from __future__ import annotations

from typing import Any

import pytest
from dsv4_triton import DSV4TritonBackend

from dsv4_matrix.composition import execute_composed
from dsv4_matrix.context import Context, Options
from dsv4_matrix.execution import Execution, Setup, execute
from dsv4_matrix.gate import PLAN_A
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
    return execute(next(case for case in setup.matrix.cases() if case.id == case_id), changed(setup, backend))


def changed(setup: Setup, backend: type) -> Setup:
    name = f"mine:{backend.__name__}"
    return Setup(setup.matrix, setup.machine, Backend(name, CheckedFactory(name, backend)), setup.reference)


LINE = Leaves.forward.__code__.co_firstlineno + 1
FRAME = f'    faults/test_exit_in_a_case.py:{LINE} in forward: raise SystemExit("bye")'


@pytest.mark.parametrize(
    ("case_id", "place"),
    [
        ("r0-eager-decode-idle", "eager leg, step 0"),
        ("r0-cg-decode-within-window", "capture"),
        ("r0-eagle-draft-runner-chain-2-steps", "eager chain, steps from 0"),
    ],
)
def test_it_is_an_error_in_the_form_of_others(setup: Setup, case_id: str, place: str) -> None:
    done = run(setup, case_id, Leaves)
    assert done.result.outcome is Outcome.ERROR
    assert done.result.reason == f"backend raised in {place}: SystemExit: bye"
    first, reason, frame, seed, again = done.message.splitlines()
    assert first == f"{case_id}: error on mine:Leaves (CPU interpreter)"
    assert reason == f"  backend raised in {place}: SystemExit: bye"
    assert frame == FRAME
    assert seed.startswith("  seed     ")
    assert again == f"  run      dsv4-matrix run --cells {case_id} --backend mine:Leaves"


def test_it_is_an_error_of_a_gates_case(setup: Setup) -> None:
    case = next(case for case in setup.matrix.cases() if case.id == "r0-eager-decode-within-window")
    done = execute_composed(case, changed(setup, Leaves), PLAN_A)
    assert done.result.outcome is Outcome.ERROR
    assert done.bits is None
    assert done.message.splitlines()[1:3] == ["  backend raised in eager leg, step 0: SystemExit: bye", FRAME]
    assert done.message.endswith(f"  run      dsv4-matrix gate --cells {case.id} --backend mine:Leaves")


@pytest.mark.parametrize("ending", [SystemExit, RuntimeError])
def test_what_it_ends_in_where_pools_are_looked_at_is_an_error_of_a_gates_case(setup: Setup, ending: type) -> None:
    """The harness asks for them between the calls of a step, outside any leg."""

    class PoolsOnce(DSV4TritonBackend):
        asked = 0

        def kv_buffers(self) -> Any:
            self.asked += 1
            if self.asked > 1:
                raise ending("bye")
            return super().kv_buffers()

    case = next(case for case in setup.matrix.cases() if case.id == "r0-eager-decode-within-window")
    for done in (execute_composed(case, changed(setup, PoolsOnce), PLAN_A), run(setup, case.id, PoolsOnce)):
        assert done.result.outcome is Outcome.ERROR
        assert done.result.reason == f"{ending.__name__}: bye"


class LeavesAtPlanning(DSV4TritonBackend):
    def init_forward_metadata(self, *arguments: Any) -> Any:
        raise SystemExit("bye")


@pytest.mark.parametrize(
    ("backend", "case_id", "told"),
    [
        (LeavesAtPlanning, "refusal-q-dtype", "the backend raised before it was brought to "),
        (LeavesAtPlanning, "refusal-unsupported-forward-mode", " raised another type."),
        (
            Leaves,
            "refusal-page-size",
            " refused, but afterwards an eager decode gave: backend raised in a small",
        ),
    ],
    ids=["on the way", "where a refusal is due", "afterwards"],
)
def test_in_a_probe_it_is_no_refusal(setup: Setup, backend: type, case_id: str, told: str) -> None:
    done = run(setup, case_id, backend)
    assert done.result.outcome is Outcome.FAILED
    assert told in done.result.reason
    assert "SystemExit: bye" in done.message


def test_one_at_construction_has_the_leg_and_the_place(setup: Setup) -> None:
    done = run(setup, "r0-eager-decode-idle", LeavesAtOnce)
    assert done.result.outcome is Outcome.ERROR
    assert done.result.reason.startswith("backend raised in eager leg, building the backend: LoadError: ")
    assert "its construction does not return: it ended in SystemExit('bye') (" in done.result.reason
    assert f"test_exit_in_a_case.py:{LeavesAtOnce.__init__.__code__.co_firstlineno + 1})" in done.result.reason


def test_an_interrupt_stays_one(setup: Setup) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(setup, "r0-eager-decode-idle", Interrupted)
