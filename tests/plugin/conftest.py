"""Tiny projects for the plugin: a stub matrix, backend and execution, so that a run takes milliseconds."""

from __future__ import annotations

import pytest
from stub_project import write_project

#: Cases that do what their variant's name says; one for GPUs only, and two probes.
STUB = """
import os
import signal
import time

from dsv4_matrix.declaration.model import Probe, State, Variant
from dsv4_matrix.execution import Execution
from dsv4_matrix.report.result import Outcome, Result

PROBE = Probe("page-size", "AssertionError", "page")


def variant(name, devices=("cpu", "gpu")):
    return Variant(name=name, forward="decode", prefix_lens=(64,), devices=devices)


NAMES = os.environ.get("STUB_VARIANTS", "good-a,good-b").split(",")
MATRIX = matrix_of(
    {"eager": "Eager", "de-eager": "DE eager"},
    (
        Cell(0, "eager", State.COVERED, tuple(variant(name) for name in NAMES)),
        Cell(4, "eager", State.COVERED, (variant("huge", devices=("gpu",)),)),
        Cell(0, "de-eager", State.DEFERRED, reason="later", probe=PROBE),
        Cell(4, "de-eager", State.NOT_APPLICABLE, reason="never", probe=PROBE),
    ),
)


def execute(case, setup):
    def result(outcome, reason="", margin="0.50"):
        return Result(case.id, case.cell_id, case.kind, outcome, reason, margin, captures=1, replays=3)

    if "crash" in case.id:
        os._exit(3)
    if "leaves" in case.id:
        os._exit(0)
    if "forks" in case.id:
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    if "bad" in case.id:
        return Execution(result(Outcome.FAILED, "worst row 3", "7.5"), f"case {case.id}\\nworst row 3: got 1, want 2")
    if "raise" in case.id:
        raise RuntimeError("broken harness at /some/where/file.py")
    if "interrupt" in case.id:
        raise KeyboardInterrupt
    if "signals" in case.id:  # the controller, once it has heard that this case began
        time.sleep(1)
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(300)
    if "print" in case.id:
        print(f"printed by {case.id}")
    if "hang" in case.id:
        time.sleep(300)
    if "touch" in case.id:
        with open(__file__, "a") as source:
            source.write("# changed under way")
    return Execution(result(Outcome.PASSED), "")


take_over(MATRIX, execute)
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project of somebody else: own test file over ``matrix_case``, stub backend and reference given by path."""
    write_project(pytester, STUB, "-p no:cacheprovider -p no:hypothesispytest")
    return pytester
