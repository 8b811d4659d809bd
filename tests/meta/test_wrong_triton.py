"""Each wrong Triton backend is caught by the case that is meant for it, and the message says what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dsv4_matrix.declaration import load_matrix
from dsv4_matrix.execution import Setup, execute
from dsv4_matrix.loading import load_backend, load_reference
from dsv4_matrix.machine import find_machine
from dsv4_matrix.report.result import Outcome

HERE = Path(__file__).parent
MATRIX = load_matrix(HERE.parents[1] / "matrix.yaml")
CASES = {case.id: case for case in MATRIX.cases()}

#: wrong backend, the case that must catch it, what its message must say
CAUGHT = [
    ("SinkDropped", "r0-eager-extend-zero-sink", "with: sink left out"),
    ("Window127", "r0-eager-decode-above-window", "with: window 127"),
    ("C4EntryEarly", "r4-eager-decode", "NaN"),
    ("PageTableRowIgnored", "r4-eager-extend-ragged", ""),
    ("PageTableRowIgnored", "r128-eager-extend-ragged", ""),
    ("StaleGraphBuffer", "r0-cg-decode-within-window", "replay"),
    ("StaleRowWhenShrinking", "r0-cg-decode-idle-between", "replay"),
    ("OutCacheLocReusedWhileIdle", "r0-cg-decode-idle-between", "cache bytes"),
    ("PadRowWritesLiveSlot", "r0-cg-decode-idle-between", "cache bytes"),
    ("VerifyRowsShareFirstLength", "r0-verify-eager-chain-3", ""),
    ("DraftPositionsNotAdvanced", "r0-eagle-draft-runner-chain-3-steps", ""),
    ("DraftSlotsStepMajor", "r0-eagle-draft-runner-chain-3-steps", ""),
    ("DraftExtendPrefixOnly", "r0-de-eager-ragged-accept-1-4", ""),
    ("LengthsNotHonoured", "r0-eager-decode-within-window", "NaN"),
    ("LseInBase2", "r0-eager-decode-within-window", "lse"),
    ("EmptyExtraEntryCounted", "r128-eager-extend-before-first-entry", "NaN"),
]


@pytest.mark.parametrize(("wrong", "case_id", "said"), CAUGHT, ids=[f"{w}-{c}" for w, c, _ in CAUGHT])
def test_caught(wrong: str, case_id: str, said: str) -> None:
    setup = Setup(MATRIX, find_machine(), load_backend(f"wrong_triton:{wrong}", HERE), load_reference())
    found = execute(CASES[case_id], setup)
    print(found.message)
    assert found.result.outcome is Outcome.FAILED
    assert said in found.message
    assert f"dsv4-matrix run --cells {case_id}" in found.message


def test_the_command_names_the_cell_and_fails() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "dsv4_matrix.cli", "run", "--backend", "wrong_triton:SinkDropped"]
        + ["--cells", "r0-eager-extend-zero-sink,r0-eager-decode-within-window", "-n", "1"],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert "r0-eager-extend-zero-sink" in run.stdout
    assert "sink left out" in run.stdout
    assert "1 of 2" in run.stdout
