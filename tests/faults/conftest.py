"""Runs of the real plugin over stub cases that die, hang or break their device on purpose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stub_project import write_project

#: Ten cases in five cells and one of each fault by name; a case does what stands in FAULTS for its id.
STUB = '''
import json
import os
import signal
import time

from dsv4_matrix import guard
from dsv4_matrix.declaration.model import State, Variant
from dsv4_matrix.execution import Execution
from dsv4_matrix.report.result import Outcome, Result

FAULTS = json.loads(os.environ.get("FAULTS", "{}"))
MODES = ("eager", "cg-decode", "verify-eager", "verify-cg", "de-cg")


def variants(mode):
    names = ("a", "b") if mode != "de-cg" else ("a", "b", "large")
    return tuple(
        Variant(name, "decode", (64,), cost=1 + len(mode), large_pool=name == "large") for name in names
    )


MATRIX = matrix_of(
    {mode: mode for mode in MODES}, tuple(Cell(0, mode, State.COVERED, variants(mode)) for mode in MODES)
)
broken = []  # what a broken device says, as long as this process lives


def execute(case, setup):
    where = (os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("CUDA_VISIBLE_DEVICES"))
    with open(os.environ["RAN"], "a") as log:
        log.write(json.dumps([case.id, *where]) + "\\n")
    fault = FAULTS.get(case.id)
    result = lambda outcome, reason="", margin="0.50": Execution(  # noqa: E731
        Result(case.id, case.cell_id, case.kind, outcome, reason, margin, captures=1, replays=3), reason
    )
    if broken:
        return result(Outcome.ERROR, "fails for the reason of another case")
    if fault == "exit":
        os._exit(3)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "abort":
        os.abort()
    if fault == "hang":
        hang_without_giving_way()
    if fault == "illegal":
        broken.append("AcceleratorError: CUDA error: an illegal memory access was encountered")
        return result(Outcome.ERROR, "RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered")
    if fault == "late":  # nobody noticed during the case
        broken.append("AcceleratorError: CUDA error: unspecified launch failure")
    if fault == "memory":
        return result(Outcome.ERROR, "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    if fault == "fail":
        return result(Outcome.FAILED, "worst row 3: got 1, want 2", "7.5")
    return result(Outcome.PASSED)


def hang_without_giving_way():
    """Like a kernel that never ends: the main thread holds the interpreter lock and sees no signal."""
    import ctypes

    libc = ctypes.PyDLL(None)  # unlike CDLL it keeps the lock
    libc.pause() if hasattr(libc, "pause") else time.sleep(10**6)


guard.device_error = lambda: broken[0] if broken else ""
guard._device_id = lambda machine: os.environ.get("CUDA_VISIBLE_DEVICES", "cpu")
guard._give_memory_back = lambda machine: None
KIND = os.environ.get("KIND", "cpu")
MODEL = "CPU interpreter" if KIND == "cpu" else "Test GPU"
take_over(MATRIX, execute, KIND, MODEL)
if KIND == "gpu":
    from dsv4_matrix import machine

    machine.gpus = lambda: tuple(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
    machine.models = lambda count: ("Test GPU",) * count
'''

ALL = tuple(
    sorted(
        f"r0-{mode}-{name}"
        for mode in ("eager", "cg-decode", "verify-eager", "verify-cg", "de-cg")
        for name in (("a", "b") if mode != "de-cg" else ("a", "b", "large"))
    )
)


class Rig:
    """Runs the stub cases and reads back the report and who ran what.

    Attributes:
        ran: of the last run, ``(case id, worker, its CUDA_VISIBLE_DEVICES)`` for every start of a case.
    """

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        write_project(pytester, STUB, "-p no:cacheprovider")
        monkeypatch.setenv("RAN", str(pytester.path / "ran.txt"))
        monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        self.pytester = pytester
        self._monkeypatch = monkeypatch
        self.ran: list[tuple[str, str | None, str | None]] = []

    def run(self, *arguments: str, faults: dict[str, str] | None = None, report: str = "out.jsonl") -> pytest.RunResult:
        self._monkeypatch.setenv("FAULTS", json.dumps(faults or {}))
        log = self.pytester.path / "ran.txt"
        log.write_text("")
        result = self.pytester.runpytest_subprocess(
            "-p", "dsv4_matrix", "-p", "xdist", "--matrix-report", report, *arguments, timeout=180
        )
        self.ran = [tuple(json.loads(line)) for line in log.read_text().splitlines()]
        return result

    def path(self, report: str = "out.jsonl") -> Path:
        return self.pytester.path / report

    def lines(self, report: str = "out.jsonl") -> dict[str, dict[str, str]]:
        """Lines of a report by case id."""
        _, *lines = self.path(report).read_text().splitlines()
        return {line["id"]: line for line in map(json.loads, lines)}


@pytest.fixture
def rig(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(pytester, monkeypatch)


@pytest.fixture(scope="session")
def all_cases() -> tuple[str, ...]:
    return ALL
