"""On a real GPU: an illegal access, one that nobody waits for, and a kernel that never ends each cost one case.

Runs real cases of the real backend; before one of them the device is broken on purpose.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
VICTIM = "r0-eager-decode-multi-request"
CELLS = "r0-eager-decode-[!l]*,r0-pcg-extend-refused,refusal-*"

CONFTEST = """
import os

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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="breaks a real device on purpose: needs one")
@pytest.mark.parametrize(
    ("fault", "outcome", "reason"),
    [
        ("illegal", "error", "illegal memory access"),
        ("late", "error", "after the case the device reported"),
        ("hang", "timeout", "no result within 30 s"),
    ],
)
def test_one_case_is_lost_and_the_rest_passes(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, fault: str, outcome: str, reason: str
) -> None:
    pytester.makepyfile(conftest=CONFTEST, test_mine=CASES)
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider\n")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("VICTIM", VICTIM)
    reports = {}
    for injected in ("", fault):
        monkeypatch.setenv("FAULT", injected)
        result = pytester.runpytest_subprocess(
            *("-n1", f"--matrix={ROOT / 'matrix.yaml'}", "--matrix-backend=triton", f"--matrix-cells={CELLS}"),
            *("--matrix-require-gpu", "--matrix-timeout", "30", "--matrix-report", "out.jsonl"),
            timeout=500,
        )
        assert result.ret == (1 if injected else 0)
        _, *lines = (pytester.path / "out.jsonl").read_text().splitlines()
        reports[injected] = {line["id"]: line for line in map(json.loads, lines)}
    assert reports[fault][VICTIM]["outcome"] == outcome
    assert reason in reports[fault][VICTIM]["reason"]
    different = {case_id for case_id, line in reports[""].items() if line != reports[fault][case_id]}
    assert different == {VICTIM}
