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
    # graphs and padding
    ("wrong_triton:StaleGraphBuffer", "r0-cg-decode-within-window", "replay"),
    ("wrong_triton:StaleRowWhenShrinking", "r0-cg-decode-idle-between", "replay"),
    ("wrong_triton:StaleRowWhenShrinking", "r0-de-cg-padded-bucket", "replay"),
    ("wrong_triton:OutCacheLocReusedWhileIdle", "r0-cg-decode-idle-between", "cache bytes"),
    ("wrong_triton:OutCacheLocReusedWhileIdle", "r0-eagle-draft-runner-chain-2-steps", "cache bytes"),
    ("wrong_triton:PadRowWritesLiveSlot", "r0-cg-decode-idle-between", "cache bytes"),
    ("wrong_triton:PadRowWritesLiveSlot", "r0-eagle-draft-runner-chain-2-steps", "cache bytes"),
    ("wrong_triton:LengthFrozenAtCapture", "r0-cg-decode-within-window", "replay"),
    ("wrong_triton:SelectionOfTheWarmUp", "r4-cg-decode-within-window", "replay"),
    ("wrong_triton:SlotMapCached", "r0-cg-decode-within-window", "replay"),
    # verify, draft extend, drafting
    ("wrong_speculation:VerifyRowsShareFirstLength", "r0-verify-eager-chain-3", "newest token dropped"),
    ("wrong_speculation:RaggedVerifyAsUniform", "r0-verify-eager-ragged", "no live key"),
    ("wrong_speculation:EmittedByLastRowOnly", "r4-verify-eager-chain-5-reused-slots", "no live key"),
    ("wrong_speculation:RejectedTokenKept", "r0-verify-eager-chain-6-reused-slots", "step 1"),
    ("wrong_speculation:RejectedEntryKept", "r4-verify-eager-chain-5-reused-slots", "step 1"),
    ("wrong_speculation:DraftPositionsNotAdvanced", "r0-eagle-draft-runner-chain-3-steps", "newest token dropped"),
    ("wrong_speculation:DraftSlotsStepMajor", "r0-eagle-draft-runner-chain-3-steps", "cache bytes"),
    ("wrong_speculation:DraftStepsShareMetadata", "r0-eagle-draft-runner-chain-3-steps", "replay"),
    ("wrong_speculation:DraftExtendPrefixOnly", "r0-de-eager-ragged-accept-1-4", "oldest token dropped"),
    ("wrong_speculation:DraftExtendAsUniform", "r0-de-eager-ragged-accept-3-2", "next token seen"),
    ("wrong_speculation:LengthsReadOnTheHost", "r0-de-eager-ragged-accept-1-4", "host sync"),
    ("wrong_speculation:LengthsReadOnTheHost", "r0-de-cg-padded-bucket", "replay 0, step 0: host sync"),
    # what a row sees
    ("wrong_triton:SinkDropped", "r0-eager-extend-zero-sink", "with: sink left out"),
    ("wrong_triton:SinkOfEveryEighthHeadDropped", "r0-cg-decode-boundaries", "tensor   out"),
    ("wrong_triton:SinkOfEveryEighthHeadDropped", "r4-eager-decode-heads-128", "tensor   out"),
    ("wrong_triton:Window127", "r0-eager-decode-above-window", "with: window 127"),
    ("wrong_triton:OwnTokenUnseen", "r0-eager-decode-within-window", "newest token dropped"),
    ("wrong_triton:QueryStrideAssumed", "r0-de-eager-boundaries", "NaN"),
    ("wrong_triton:C4EntryEarly", "r4-eager-decode", "NaN"),
    ("wrong_triton:EntriesInWindowLeftOut", "r4-eager-decode", "row 0 of 1"),
    ("wrong_triton:PageTableRowIgnored", "r4-eager-extend-ragged", "NaN"),
    ("wrong_triton:PageTableRowIgnored", "r128-eager-extend-ragged", "NaN"),
    ("wrong_triton:LengthsNotHonoured", "r0-eager-decode-within-window", "NaN"),
    # both lists, and the prefill's; eager, in graphs and of a draft
    ("wrong_triton:LengthsIgnored", "r0-eager-decode-within-window", "the window's list read past"),
    ("wrong_triton:LengthsIgnored", "r0-cg-decode-within-window", "the window's list read past"),
    ("wrong_triton:LengthsIgnored", "r0-eagle-draft-runner-chain-3-steps", "the window's list read past"),
    ("wrong_triton:LengthsIgnored", "r4-eager-decode", "both lists read past"),
    ("wrong_triton:ExtraLengthIgnored", "r4-eager-decode", "list of compressed entries read past"),
    ("wrong_triton:ExtraLengthIgnored", "r128-eager-decode", "list of compressed entries read past"),
    ("wrong_triton:ExtraLengthIgnored", "r4-verify-cg-chain-3", "list of compressed entries read past"),
    ("wrong_triton:ExtraLengthIgnored", "r128-verify-cg-chain-3", "list of compressed entries read past"),
    ("wrong_triton:PrefillLengthIgnored", "r0-eager-extend-within-window", "the window's list read past"),
    ("wrong_triton:PrefillLengthIgnored", "r4-eager-extend", "the combined list of entries and window read past"),
    ("wrong_triton:EntriesAsLongAsTheWindow", "r4-cg-decode-page-crossing", "tensor   out"),
    ("wrong_triton:LseInBase2", "r0-eager-decode-within-window", "lse"),
    ("wrong_triton:EmptyExtraEntryCounted", "r128-eager-extend-before-first-entry", "without compressed entries and"),
    ("quiet_defects:NoRunningMaximum", "r0-eager-decode-within-window", "beside an lse of inf, as of an exp that"),
]


@pytest.mark.parametrize(("wrong", "case_id", "said"), CAUGHT, ids=[f"{w.split(':')[1]}-{c}" for w, c, _ in CAUGHT])
def test_caught(wrong: str, case_id: str, said: str) -> None:
    setup = Setup(MATRIX, find_machine(), load_backend(wrong, HERE), load_reference())
    found = execute(CASES[case_id], setup)
    print(found.message)
    assert found.result.outcome is Outcome.FAILED
    assert said in found.message
    assert f"dsv4-matrix run --cells {case_id}" in found.message


def test_the_command_names_the_cell_and_fails() -> None:
    cases = "r0-eager-extend-zero-sink,r0-eager-decode-within-window"
    options = ["--backend", "wrong_triton:SinkDropped", "--cells", cases, "-n", "1"]
    run = subprocess.run(
        [sys.executable, "-m", "dsv4_matrix.cli", "run", *options],
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
