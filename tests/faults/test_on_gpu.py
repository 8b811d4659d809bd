"""On a real GPU: an illegal access, one that nobody waits for, an endless kernel and a kill each cost one case.

Runs real cases of the real backend; before or behind one of them the device is broken on purpose. One undisturbed run
serves all faults: it says what the other cases' lines are, and compiles every kernel, so that the deadline of a hang
can be short without a compiler's time in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_matrix.shard.notes import NOTES
from dsv4_matrix.shard.workers import PLACE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="breaks a real device on purpose: needs one")

ROOT = Path(__file__).parents[2]
#: One case before the victim and one behind it in the same cell, and a probe behind both.
VICTIM = "r0-eager-decode-multi-request"
CELLS = f"r0-eager-decode-above-window,{VICTIM},r0-eager-decode-within-window,refusal-page-size"
#: Seconds: of a process that starts with compiled kernels, the first case takes two or three, creating the context
#: included. The undisturbed run has the usual deadline.
DEADLINE = 15

CONFTEST = """
import os
import signal

import torch
import triton
import triton.language as tl

from dsv4_matrix import execution

real = execution.execute


@triton.jit
def poke(base, distance):
    tl.store(base + distance, 1)


def execute(case, setup):
    fault = os.environ.get("FAULT") if case.id == os.environ["VICTIM"] else None
    if fault == "illegal":
        poke[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"), 2**44)
    if fault == "kill":  # with work of its own on the device
        torch.cuda._sleep(2**34)
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        torch.cuda._sleep(2**62)
    done = real(case, setup)
    if fault == "late":  # nobody waits for it within the case
        poke[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"), 2**44)
    return done


execution.execute = execute
"""

CASES = """
def test_cell(matrix_case):
    matrix_case.execute()
"""


class Project:
    """A folder with the tests above, run by a pytest of its own in which no other plugin takes part."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "conftest.py").write_text(CONFTEST)
        (folder / "test_mine.py").write_text(CASES)
        (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
        self._environment = {name: value for name, value in kept.items() if name not in (PLACE, NOTES)} | {
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "VICTIM": VICTIM,
        }

    def run(self, fault: str = "", timeout: float = 300) -> tuple[int, str, dict[str, Any]]:
        """Exit status, what was printed, and the report's lines by case id."""
        report = self._folder / f"{fault or 'undisturbed'}.jsonl"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-p", "dsv4_matrix", "-p", "xdist", "-n1"),
                *(f"--matrix={ROOT / 'matrix.yaml'}", "--matrix-backend=triton", f"--matrix-cells={CELLS}"),
                *("--matrix-require-gpu", f"--matrix-timeout={timeout}", f"--matrix-report={report}"),
            ],
            cwd=self._folder,
            env={**self._environment, "FAULT": fault},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout + 120,
        )
        assert report.exists(), done.stdout
        _, *lines = report.read_text().splitlines()
        return done.returncode, done.stdout, {line["id"]: line for line in map(json.loads, lines)}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def undisturbed(project: Project) -> dict[str, Any]:
    status, printed, lines = project.run()
    assert status == 0, printed
    assert sum(line["outcome"] == "passed" for line in lines.values()) == len(CELLS.split(","))
    return lines


@pytest.mark.parametrize(
    ("fault", "outcome", "reason"),
    [
        ("illegal", "error", "illegal memory access"),
        ("late", "error", "after the case the device reported"),
        ("kill", "lost", "its worker was killed by SIGKILL"),
        ("hang", "timeout", f"no result within {DEADLINE} s"),
    ],
)
def test_one_case_is_lost_and_the_rest_passes(
    project: Project, undisturbed: dict[str, Any], fault: str, outcome: str, reason: str
) -> None:
    status, printed, lines = project.run(fault, DEADLINE)
    assert status == 1, printed
    assert lines[VICTIM]["outcome"] == outcome, printed
    assert reason in lines[VICTIM]["reason"], printed
    different = {case_id for case_id, line in undisturbed.items() if line != lines[case_id]}
    assert different == {VICTIM}, printed
