"""The gate over this backend: sound runs agree in all bits, and each defect of the bits is found."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4_matrix.admission import NotAdmittedError
from dsv4_matrix.composition import execute_composed
from dsv4_matrix.context import Context, Options
from dsv4_matrix.declaration import find_matrix, load_matrix
from dsv4_matrix.environment import Attestation
from dsv4_matrix.execution import Setup
from dsv4_matrix.gate import PLAN_A, PLAN_B, RowStore, Run, compare
from dsv4_matrix.gate.rows import describe
from dsv4_matrix.gate_command.child import admitted
from dsv4_matrix.loading import load_backend, load_reference
from dsv4_matrix.machine import find_machine
from dsv4_matrix.report.bits import BitsReport, Level
from dsv4_matrix.report.result import Header, Outcome, Report

META = Path(__file__).parents[1] / "meta"
MATRIX = load_matrix(find_matrix())
CASES = {case.id: case for case in MATRIX.cases()}
DECODE, C4_GRAPH = "r0-eager-decode-heads-16", "r4-cg-decode-emissions"
CHAIN = "r0-eagle-draft-runner-chain-3-steps"
#: 129 + 513 keys: one more than a split, so that its accumulators are to be had.
SPLIT = "r128-eager-decode-heads-16"
PREFILL = "r0-eager-extend-prefix-one-page"


def setup(backend=None):
    return Setup(MATRIX, find_machine(), load_backend(backend, META), load_reference())


def two_runs(folder, case_id, backend=None, among="middle,last,nan-neighbour,padded"):
    """The outcomes of one case under both plans, and the verdict on its bits, in this process."""
    served, runs, outcomes = setup(backend), [], []
    for plan in (PLAN_A, replace(PLAN_B, composition=among)):
        store = RowStore(folder / plan.name)
        done = execute_composed(CASES[case_id], served, plan, store)
        outcomes.append((done.result.outcome, done.message))
        report = Report(Header("m", "f", "b", "d", "t", "t"), (done.result,))
        bits = {case_id: done.bits} if done.bits is not None else {}
        runs.append(Run(plan.name, BitsReport(report, bits), (Attestation((), (), ()),)))
    stores = [RowStore(folder / name) for name in "AB"]
    verdict = compare(*runs, level=Level.BATCH, detail=lambda *key: describe(*stores, *key))
    return outcomes, verdict


@pytest.mark.parametrize("case_id", [DECODE, C4_GRAPH, CHAIN, "r128-verify-eager-ragged", "r0-eager-extend-page-above"])
def test_a_sound_backend_is_aligned(tmp_path, case_id):
    outcomes, verdict = two_runs(tmp_path, case_id)
    assert [outcome for outcome, _ in outcomes] == [Outcome.PASSED] * 2, outcomes
    assert verdict.aligned, verdict
    assert verdict.compared >= 2


@pytest.mark.parametrize(
    ("wrong", "case_id", "told"),
    [
        ("wrong_bits:SplitsFollowBatch", DECODE, "ulp apart"),
        ("wrong_bits:TileFollowsBatch", DECODE, "ulp apart"),
        ("wrong_bits:PositionInBatch", DECODE, "in batch last is not that in batch middle"),
        ("wrong_bits:NeighbourLeaks", DECODE, "in batch nan-neighbour is not that in batch middle"),
        ("wrong_triton:StaleGraphBuffer", C4_GRAPH, "differs in bits from the eager run"),
        ("wrong_bits:ReadsPastLength", C4_GRAPH, "in batch nan-neighbour is not that in batch middle"),
        ("wrong_bits:AccumulatorsFollowBatch", SPLIT, "accumulators row step 0/eager/r0/p65663: column 0"),
        ("wrong_bits:ChunksMoveTiles", PREFILL, "in batch chunk-1 is not that in batch middle"),
    ],
)
def test_each_defect_is_found(tmp_path, wrong, case_id, told):
    one_batch = told == "ulp apart" or case_id == SPLIT
    kinds = "middle" if one_batch else "middle,last,nan-neighbour,padded"
    kinds += ",chunk-1" if case_id == PREFILL else ""
    outcomes, verdict = two_runs(tmp_path, case_id, wrong, kinds)
    assert not verdict.aligned
    said = "\n".join([str(verdict), *(message for _, message in outcomes)])
    assert told in said, said
    assert "dsv4-matrix run" not in said


def test_accumulators_are_compared_where_the_backend_has_them():
    bits = execute_composed(CASES[SPLIT], setup(), PLAN_A).bits
    assert {tensor for tensor, _ in bits.digests} == {"out", "lse", "accumulators"}
    assert {tensor for tensor, _ in execute_composed(CASES[DECODE], setup(), PLAN_A).bits.digests} == {"out", "lse"}


def test_accumulators_that_differ_between_batches_of_a_run_are_told():
    among = replace(PLAN_B, composition="alone,middle")
    done = execute_composed(CASES[SPLIT], setup("wrong_bits:AccumulatorsFollowBatch"), among)
    assert done.result.outcome is Outcome.FAILED
    assert "the needle's accumulators of p" in done.message
    assert "in batch middle are not those in batch alone: row 0 (at 0) column 0: 0x" in done.message


def test_a_needle_that_is_wrong_everywhere_is_told_once():
    done = execute_composed(CASES[DECODE], setup("wrong_triton:Window127"), PLAN_A)
    assert done.result.outcome is Outcome.FAILED
    head, found, *_ = done.message.splitlines()
    assert head.startswith(f"{DECODE}: failed on ")
    assert found == '  the needle: leg "needle", step 0, ratio 0'
    assert done.message.count(f"{DECODE}: failed on ") == 1
    assert "agrees   with: window 127" in done.message


def test_only_chunks_show_bits_that_follow_them(tmp_path):
    """The same defect in every other batch: it is the chunk that finds it."""
    outcomes, verdict = two_runs(tmp_path, PREFILL, "wrong_bits:ChunksMoveTiles")
    assert [outcome for outcome, _ in outcomes] == [Outcome.PASSED] * 2
    assert verdict.aligned


def test_a_prefill_has_the_same_bits_in_chunks(tmp_path):
    for case_id in ("r4-eager-extend-no-prefix", "r128-eager-extend-before-first-entry"):
        outcomes, verdict = two_runs(tmp_path, case_id, among="middle,chunk-4")
        assert [outcome for outcome, _ in outcomes] == [Outcome.PASSED] * 2, outcomes
        assert verdict.aligned


def test_a_case_whose_bits_show_no_split_is_insensitive(monkeypatch):
    monkeypatch.setattr("dsv4_matrix.judge.split_sight.LEAST", 1.1)
    done = execute_composed(CASES[DECODE], setup(), PLAN_A)
    assert done.result.outcome is Outcome.INSENSITIVE
    assert done.bits is None
    assert "another split of the needle's keys" in done.message


# --- the command, with its child processes


def gate(folder, *arguments):
    command = [sys.executable, "-m", "dsv4_matrix.cli", "gate", "--folder", str(folder), *arguments]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL", "CUBLAS", "NVIDIA_TF32"))}
    done = subprocess.run(command, cwd=META, env=environ, capture_output=True, text=True, timeout=500, check=False)
    verdicts = [json.loads(path.read_text()) for path in folder.glob("gate-*/verdict.json")]
    return done.returncode, done.stdout + done.stderr, verdicts[0] if verdicts else None


def test_the_command_finds_sound_runs_aligned(tmp_path):
    status, said, verdict = gate(
        tmp_path, "--cells", f"{DECODE},{C4_GRAPH}", "-n", "2", "--router", "dsv4_matrix.routing:ByCost"
    )
    assert status == 0, said
    assert verdict["aligned"]
    assert verdict["compared"] == 4
    assert "run B: 2 workers, descending order" in said


@pytest.mark.parametrize("wrong", ["OrderFollowsHash", "ChangesBetweenRuns"])
def test_the_command_finds_what_differs_between_processes(tmp_path, wrong):
    more = ("--cells", DECODE, "-n", "1", "--level", "L1")
    status, said, verdict = gate(tmp_path, "--backend", f"wrong_bits:{wrong}", *more)
    assert status == 1, said
    assert {mismatch["case"] for mismatch in verdict["mismatched"]} == {DECODE}


WRONG = """
from dsv4_triton import DSV4TritonBackend


class Wrong(DSV4TritonBackend):
    DETERMINISM = DSV4TritonBackend.DETERMINISM

    def attend(self, *arguments):
        out, lse = super().attend(*arguments)
        return out + 1, lse
"""


def test_the_line_under_a_failure_is_the_gate_as_it_was_asked(tmp_path):
    """With the level and the user's own path; what follows from defaults is not said, and the line fails alike."""
    (tmp_path / "my own.yaml").write_bytes(Path(MATRIX.path).read_bytes())
    (tmp_path / "mine.py").write_text(WRONG)
    told = f"dsv4-matrix gate --cells {DECODE} --backend mine:Wrong --matrix 'my own.yaml'"

    def lines(*arguments):
        command = [sys.executable, "-m", "dsv4_matrix.cli", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 1, done.stdout + done.stderr
        return [line.removeprefix("  run      ") for line in done.stderr.splitlines() if line.startswith("  run ")]

    given = ("--cells", DECODE, "--backend", "mine:Wrong", "--matrix", "my own.yaml", "-n", "1", "--minimum", "1")
    assert lines("gate", *given) == [told] * 2  # run A and run B
    line, again = lines("gate", *given, "--level", "L1")
    assert line == again == f"{told} --level L1"
    assert lines(*shlex.split(line)[1:]) == [line] * 2


def test_a_serial_path_is_admitted_where_needles_are_alone():
    options = Options(None, "wrong_bits:SerialOnly", None, DECODE, None, False, META, True)
    context = Context(options)
    paths = admitted(context, context.cases, Level.SAME_CASES)
    assert execute_composed(CASES[DECODE], context.setup, PLAN_A, paths=paths).result.outcome is Outcome.PASSED
    together = execute_composed(CASES[DECODE], context.setup, replace(PLAN_B, composition="middle"), paths=paths)
    assert together.result.outcome is Outcome.ERROR
    assert "path attention is serial_only and got 3 requests in one call" in together.message
    assert together.bits is None
    with pytest.raises(NotAdmittedError, match=r"unsupported\(serial_only\): attention makes no promise about batches"):
        admitted(context, context.cases, Level.BATCH)


def test_a_serial_path_gets_one_request_a_call_also_in_graphs(tmp_path):
    wrong = ("--backend", "wrong_bits:SerialOnly", "--cells", C4_GRAPH, "--level", "L1", "-n", "1")
    status, said, verdict = gate(tmp_path, *wrong)
    assert status == 0, said
    assert verdict["aligned"]
    for run in "AB":
        line = json.loads(next(tmp_path.glob(f"gate-*/{run}.forced.jsonl")).read_text())
        assert line == {"field": "bucket", "id": C4_GRAPH, "new": "1", "old": "3", "rule": "attention is serial_only"}
        assert f"run {run}: 1 values of 1 cases were replaced by a rule" in said


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (("--backend", "wrong_bits:Undeclared"), 1, "path attention declares no determinism"),
        (("--backend", "wrong_bits:SerialOnly"), 1, "unsupported(serial_only)"),
        (
            ("--router", "dsv4_matrix.routing:_ID"),
            2,
            "gate: router 'dsv4_matrix.routing:_ID' has no assign(ids",
        ),
        (("--cells", "r9*"), 2, "gate: --cells: no case id matches 'r9*'"),
        (("--cells", "*-refused,refusal-*"), 2, "selected cases can be compared at L2: a probe, a refusal and"),
        (("--cells", "r0-eager-decode-idle"), 2, "none of the 1 selected cases can be compared at L2"),
        (("--every", "999999"), 2, "none of the 1 selected cases, of which --every 999999 leaves 0, can be compared"),
        (("--level", "L4"), 2, "name them, as in --devices 0,1"),
        (("--devices", "0,1"), 2, "only --level L4 compares devices"),
        (("--record", "evidence"), 2, "--record: evidence is of the whole matrix; leave out --cells and --every"),
    ],
)
def test_the_command_refuses(tmp_path, arguments, status, told):
    found, said, _ = gate(tmp_path, *(() if "--cells" in arguments else ("--cells", DECODE)), *arguments)
    assert told in said
    assert found == status


@pytest.mark.parametrize("option", ["--backend", "--reference", "--router"])
def test_code_that_exits_at_import_is_one_line_of_bad_input(tmp_path, option):
    (tmp_path / "leaves.py").write_text("import sys\n\nsys.exit('bye')\n")
    command = [sys.executable, "-m", "dsv4_matrix.cli", "gate", "--cells", DECODE, option, "leaves:Backend"]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=500
    )
    told = f"{option[2:]} 'leaves:Backend': module leaves does not import: it ended in SystemExit('bye') (leaves.py:3)"
    assert (done.returncode, done.stderr) == (2, f"dsv4-matrix gate: {told}\n")
    assert "aligned" not in done.stdout
