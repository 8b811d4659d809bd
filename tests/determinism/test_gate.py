"""The gate over real child processes: 0 for sound runs however they differ in form, 1 for each defect."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dsv4_matrix.declaration import find_matrix
from dsv4_matrix.environment import Attestation
from dsv4_matrix.gate import PLAN_A, PLAN_B, RowStore, Run, RunPlan, Verdict, compare, run_gate, sampled
from dsv4_matrix.gate.canaries import UNTRIED, uncaught, uncaught_in
from dsv4_matrix.gate.rows import describe
from dsv4_matrix.gate_command.session import recorder
from dsv4_matrix.report import gate_evidence
from dsv4_matrix.report.bits import BitsReport, CaseBits, Level, dumps, loads
from dsv4_matrix.report.canonical import ReportError
from dsv4_matrix.report.digest import DigestError
from dsv4_matrix.report.result import Header, Outcome, Report, Result

TOY = Path(__file__).parent / "toy_run.py"
MATRIX = Path(find_matrix())
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith(("NCCL", "CUBLAS", "NVIDIA_TF32"))}


def gate(folder, defect="none", *, environ=None, minimum=2, level=Level.BATCH, **more):
    out = io.StringIO()
    status = run_gate(
        lambda plan, report: [str(TOY), str(report), defect],
        level=level,
        minimum=minimum,
        folder=folder,
        environ={**CLEAN, **(environ or {})},
        out=out,
        **more,
    )
    verdict = json.loads(next(folder.glob("gate-*/verdict.json")).read_text())
    return status, out.getvalue(), verdict


def test_sound_runs_are_aligned(tmp_path):
    status, out, verdict = gate(tmp_path)
    assert status == 0, out
    assert verdict["aligned"] is True
    assert verdict["compared"] == 2
    assert not list(tmp_path.glob("gate-*/*.rows"))
    assert "run A: 1 worker, ascending" in out
    assert "run B: 4 workers, descending" in out


def test_equal_nans_are_aligned(tmp_path):
    assert gate(tmp_path, "nan")[0] == 0


@pytest.mark.parametrize(
    ("defect", "told"),
    [
        ("splits-from-batch", "differ"),
        ("order-from-hash", "differ"),
        ("zero-sign", "0x0000000000000000 against 0x8000000000000000"),
        ("below-fp32", "ulp apart"),
        ("shape", "differ"),
        ("other-steps", "missing in run A"),
        ("missing-case", "in one report only"),
        ("wrong", "toy-b is failed in run A"),
        ("lost", "toy-b is lost in run B"),
        ("crash", "run B ended with status 3"),
        ("truncated", "truncated"),
        ("empty", "an empty run proves nothing"),
        ("version", "torch 2.13 against 2.14"),
        ("reused", "results of another run were reused"),
        ("same-file", "same file"),
        ("drift", "CUBLAS_WORKSPACE_CONFIG was set to :16:8"),
        ("no-attestation", "attested no environment"),
    ],
)
def test_each_defect_is_refused_or_found(tmp_path, defect, told):
    status, out, verdict = gate(tmp_path, defect)
    assert status == 1
    assert told in out
    assert verdict["aligned"] is False


def test_a_mismatch_names_case_tensor_row_and_bits(tmp_path):
    _, out, verdict = gate(tmp_path, "splits-from-batch")
    assert len(list(tmp_path.glob("gate-*/*.rows"))) == 2
    told = verdict["mismatched"][0]
    assert (told["case"], told["tensor"], told["row"]) == ("toy-a", "out", "step-0")
    assert f"case toy-a tensor out row step-0: {told['detail']}" in out
    assert told["detail"].startswith("column 0: 0x")
    assert "ulp apart" in told["detail"]


def test_a_defect_of_the_batch_is_none_at_a_lower_level(tmp_path):
    alone = replace(PLAN_B, composition="alone")
    assert gate(tmp_path, "splits-from-batch", plans=(PLAN_A, alone), level=Level.SAME_CASES)[0] == 0


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, "CUBLAS_WORKSPACE_CONFIG is set to ':4096:8'"),
        ({"DSV4_INVARIANT_LOGPROBS": "0"}, "not deterministic: DSV4_INVARIANT_LOGPROBS=0"),
        ({"DSV4_INVARIANT_LOGPROBS": ""}, "DSV4_INVARIANT_LOGPROBS is set to ''"),
    ],
)
def test_the_users_environment_can_refuse_the_gate(tmp_path, environ, told):
    status, out, _ = gate(tmp_path, environ=environ)
    assert status == 1
    assert told in out
    assert "run A: " not in out


def test_the_users_hash_seed_does_not_matter(tmp_path):
    assert gate(tmp_path, environ={"PYTHONHASHSEED": "77"})[0] == 0


def test_too_few_rows_or_promises(tmp_path):
    status, out, _ = gate(tmp_path / "rows", minimum=3)
    assert status == 1
    assert "2 rows at level L2, at least 3 are needed" in out
    status, out, _ = gate(tmp_path / "promise", level=Level.DEVICE)
    assert status == 1
    assert "0 rows at level L4" in out
    assert "canary not tried: there is no digest to alter" in out
    assert "not caught" not in out


def test_a_verdict_is_recorded_whatever_it_is(tmp_path):
    for defect, aligned in (("none", True), ("splits-from-batch", False)):
        folder = tmp_path / defect
        status, out, _ = gate(folder, defect, record=recorder(MATRIX, Level.BATCH, folder / "evidence"))
        assert status == (0 if aligned else 1)
        found = gate_evidence.read(folder / "evidence" / "toy.gate.json")
        assert (found.aligned, found.cases, found.rows, found.level) == (aligned, 2, 2, Level.BATCH)
        assert found.differ == (0 if aligned else 2)
        assert found.gate_sources == gate_evidence.gate_fingerprint(MATRIX)
        assert len(found.environment) == 64
        assert "evidence recorded in" in out


def test_an_uncaught_canary_is_in_the_evidence(tmp_path):
    record = recorder(MATRIX, Level.BATCH, tmp_path / "evidence")
    assert gate(tmp_path, judge=always_aligned, record=record)[0] == 1
    assert not gate_evidence.read(tmp_path / "evidence" / "toy.gate.json").aligned


def test_what_was_not_compared_leaves_no_evidence(tmp_path):
    assert gate(tmp_path, "version", record=recorder(MATRIX, Level.BATCH, tmp_path / "evidence"))[0] == 1
    assert not (tmp_path / "evidence").exists()


def test_evidence_of_sources_that_changed_meanwhile_is_not_recorded(tmp_path, monkeypatch):
    record = recorder(MATRIX, Level.BATCH, tmp_path / "evidence")
    monkeypatch.setattr(gate_evidence, "gate_fingerprint", lambda _: "another")
    status, out, verdict = gate(tmp_path, record=record)
    assert (status, verdict["aligned"]) == (1, True)
    assert "evidence not recorded: the sources changed while the gate ran" in out


# --- the comparison and its canaries, without processes


def make_run(name="a", *, rows=None, outcome=Outcome.PASSED, promise=Level.BATCH, attested=None):
    rows = {("out", "needle"): "0" * 64, ("out", "other"): "1" * 64} if rows is None else rows
    report = Report(Header("m", "f", "toy", "cpu", "2", "3"), (Result("case", "r0/decode", "case", outcome),))
    bits = {"case": CaseBits(promise, rows)} if rows else {}
    return Run(name, BitsReport(report, bits), attested or (Attestation((), (), ()),))


at_batch = partial(compare, level=Level.BATCH)


def test_pairing_is_by_key_and_not_by_place():
    rows = {("out", "other"): "1" * 64, ("out", "needle"): "0" * 64}
    assert at_batch(make_run("a"), make_run("b", rows=rows)).aligned


def test_a_run_is_not_compared_with_itself():
    assert "not compared with itself" in at_batch(make_run("a"), make_run("a")).refused


def test_all_attestations_of_both_runs_must_agree():
    one, other = Attestation((("torch", "1"),), (), ()), Attestation((("torch", "2"),), (), ())
    assert not at_batch(make_run("a", attested=(one, one)), make_run("b", attested=(one, one))).refused
    assert "torch" in at_batch(make_run("a", attested=(one, one)), make_run("b", attested=(one, other))).refused
    assert "torch" in at_batch(make_run("a", attested=(one, other)), make_run("b", attested=(one, one))).refused


def test_cases_that_neither_run_planned_are_left_out_but_count_for_nothing():
    not_run = [make_run(name, rows={}, outcome=Outcome.NOT_RUN) for name in "ab"]
    verdict = at_batch(*not_run)
    assert not verdict.aligned
    assert verdict.fell_short == ("0 rows at level L2, at least 1 are needed",)


def test_bits_that_agree_on_a_case_that_did_not_pass():
    verdict = at_batch(make_run("a", outcome=Outcome.FAILED), make_run("b", outcome=Outcome.FAILED))
    assert not verdict.mismatched
    assert not verdict.aligned


def test_levels_are_ordered():
    assert Level.GRAPH.covers(Level.BATCH)
    assert not Level.SAME_PLAN.covers(Level.SAME_CASES)
    assert at_batch(make_run("a", promise=Level.SAME_CASES), make_run("b", promise=Level.SAME_CASES)).compared == 0


def always_aligned(a, b, **_):
    return Verdict(aligned=True, compared=9)


def ignores_rows(a, b, **options):
    """Compares the sets of digests: blind to exchanged rows."""
    left, right = (sorted(r for c in run.report.bits.values() for r in c.digests.values()) for run in (a, b))
    return compare(a, b, **options) if left != right else Verdict(aligned=True, compared=len(left))


def never_aligned(a, b, **options):
    return replace(compare(a, b, **options), aligned=False)


def test_canaries_are_caught():
    assert uncaught(at_batch) == ()
    assert uncaught_in(make_run(), at_batch, Level.BATCH) == ()


@pytest.mark.parametrize(
    ("broken", "told"),
    [(always_aligned, "flipped bit"), (ignores_rows, "exchanged rows"), (never_aligned, "equal runs")],
)
def test_a_broken_comparison_fails_the_gate(tmp_path, broken, told):
    judge = partial(broken, level=Level.BATCH)
    assert any(told in canary for canary in uncaught(judge))
    status, out, _ = gate(tmp_path, judge=broken)
    assert status == 1
    assert "canary not caught" in out


def test_canaries_in_the_runs_own_digests():
    for broken, told in ((always_aligned, "altered"), (ignores_rows, "exchanged")):
        judge = partial(broken, level=Level.BATCH)
        assert any(told in canary for canary in uncaught_in(make_run(), judge, Level.BATCH))
    assert uncaught_in(make_run(), at_batch, Level.DEVICE) == (UNTRIED,)


def test_bits_travel_in_the_canonical_report():
    run = make_run().report
    data = dumps(run)
    assert loads(data) == run
    assert dumps(loads(data)) == data
    assert b'"promises":"L2"' in data
    for wrong in (
        data.replace(b'"L2"', b'"L9"'),
        data.replace(b'"1111', b'"X111'),
        data.replace(b',"promises":"L2"', b""),
        data[:-3],
    ):
        assert wrong != data
        with pytest.raises(ReportError):
            loads(wrong)
    with pytest.raises(ReportError, match="does not have"):
        dumps(replace(run, bits={"unknown": run.bits["case"]}))


def test_plans_change_what_must_not_matter_and_travel():
    assert PLAN_A != PLAN_B
    for name in ("workers", "reverse", "hash_seed", "locale", "timezone", "composition", "fillers"):
        assert getattr(PLAN_A, name) != getattr(PLAN_B, name)
    assert RunPlan.observed(PLAN_B.environ("B-1")) == PLAN_B
    assert RunPlan.observed({}) is None


def test_sampling_is_the_same_every_day():
    ids = [f"case-{at}" for at in range(400)]
    some = sampled(ids, 4)
    assert some == sampled(reversed(ids), 4)
    assert 70 < len(some) < 130
    assert sampled(ids, 1) == tuple(sorted(ids))
    assert set(sampled(ids[:200], 4)) <= set(some)
    with pytest.raises(ValueError, match="one in 0"):
        sampled(ids, 0)


def test_raw_rows(tmp_path):
    a, b = RowStore(tmp_path / "a"), RowStore(tmp_path / "b")
    assert describe(a, b, "c", "t", "r") == ""
    a.put("c", "t", "r", "bfloat16", bytes.fromhex("803f 803f"))
    assert describe(a, b, "c", "t", "r") == ""
    b.put("c", "t", "r", "bfloat16", bytes.fromhex("803f 823f"))
    assert describe(a, b, "c", "t", "r") == "column 1: 0x3F80 against 0x3F82, 2 ulp apart; 1 of 2 elements differ"
    b.put("c", "t", "r", "bfloat16", bytes.fromhex("803f c07f"))
    assert "ulp" not in describe(a, b, "c", "t", "r")
    b.put("c", "t", "r", "bfloat16", bytes.fromhex("803f"))
    assert "4 bytes against bfloat16 of 2 bytes" in describe(a, b, "c", "t", "r")
    b.put("c", "t", "r", "bfloat16", bytes.fromhex("803f 803f"))
    assert describe(a, b, "c", "t", "r") == ""
    with pytest.raises(DigestError, match="whole number"):
        a.put("c", "t", "r", "float32", b"123")
