"""A worker that is killed, ends itself, hangs or breaks its device costs exactly one case, which is not run again."""

from __future__ import annotations

from typing import Any

import pytest

VICTIM = "r0-verify-cg-a"
DIES = {
    "exit": ("lost", "its worker ended with exit status 3 while the case ran"),
    "kill": ("lost", "its worker was killed by SIGKILL while the case ran"),
    "abort": ("lost", "its worker was killed by SIGABRT while the case ran"),
    "hang": ("timeout", "no result within 3 s; its worker was ended and replaced"),
    "illegal": ("error", "RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered"),
    "late": ("error", "after the case the device reported AcceleratorError: CUDA error: unspecified launch failure"),
    "memory": ("error", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
}


@pytest.fixture(autouse=True)
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIND", "gpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("fault", DIES)
def test_it_costs_that_case_alone(rig: Any, all_cases: tuple[str, ...], fault: str, workers: int) -> None:
    result = rig.run(f"-n{workers}", "--matrix-timeout", "3", faults={VICTIM: fault})
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    lines = rig.lines()
    assert {i for i, line in lines.items() if line["outcome"] == "passed"} == set(all_cases) - {VICTIM}
    assert (lines[VICTIM]["outcome"], lines[VICTIM]["reason"]) == DIES[fault]
    started = [case_id for case_id, _, _ in rig.ran]
    assert sorted(started) == sorted(all_cases), "every case began exactly once"
    place = {gpu for case_id, _, gpu in rig.ran if case_id == VICTIM}
    after = [r for r in rig.ran[started.index(VICTIM) + 1 :] if r[2] in place]
    victim = next(worker for case_id, worker, _ in rig.ran if case_id == VICTIM)
    assert all(worker != victim for _, worker, _ in after), "what came after ran on a replacement"


def test_several_faults_cost_one_case_each(rig: Any, all_cases: tuple[str, ...]) -> None:
    faults = dict(zip(all_cases, ["exit", "illegal", "kill", "hang", "late", "abort", "memory", "fail"], strict=False))
    result = rig.run("-n2", "--matrix-timeout", "3", faults=faults)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    outcomes = {i: line["outcome"] for i, line in rig.lines().items()}
    assert {i for i, outcome in outcomes.items() if outcome != "passed"} == set(faults)
    assert sorted(case_id for case_id, _, _ in rig.ran) == sorted(all_cases)


def test_the_report_of_a_faulty_run_does_not_depend_on_workers(rig: Any) -> None:
    faults = {VICTIM: "illegal", "r0-eager-b": "exit", "r0-cg-decode-a": "fail"}
    for workers in (1, 2):
        rig.run(f"-n{workers}", faults=faults, report=f"{workers}.jsonl")
    assert rig.path("1.jsonl").read_bytes() == rig.path("2.jsonl").read_bytes()


def test_the_stack_of_a_hang_is_in_its_message(rig: Any) -> None:
    result = rig.run("-n1", "--matrix-timeout", "3", faults={VICTIM: "hang"})
    result.stdout.fnmatch_lines(["*in hang_without_giving_way*"])
    assert "hang_without_giving_way" in rig.path("out.telemetry.jsonl").read_text()
    assert "hang_without_giving_way" not in rig.path().read_text()


@pytest.mark.parametrize(
    ("fault", "given", "told"),
    [
        ("exit", ("--matrix-timeout", "30"), " -n 1"),
        ("exit", ("--matrix-seeds", "2"), " --seeds 2 -n 1"),
        ("hang", ("--matrix-timeout", "3", "--matrix-seeds", "1"), " --timeout 3"),
    ],
)
def test_the_command_that_repeats_a_death_names_what_decided_it(
    rig: Any, fault: str, given: tuple[str, ...], told: str
) -> None:
    """Which draw killed the worker is not known, so all are named; without its limit, a hang would not end.

    Without a worker, the command would die where the case does.
    """
    result = rig.run("-n1", *given, faults={VICTIM: fault})
    line = f"run      dsv4-matrix run --cells {VICTIM} --backend stub:Backend"
    result.stdout.re_match_lines([rf" +{line}( --reference stub:reference)?{told}$"])


def test_a_slow_case_within_its_time_passes(rig: Any) -> None:
    result = rig.run("-n1", "--matrix-timeout", "30")
    assert result.ret == 0


def test_in_one_process_the_run_stops_at_a_broken_device(rig: Any, all_cases: tuple[str, ...]) -> None:
    """Nothing can be replaced there; cases that were not run are lost, never failed for another's reason."""
    result = rig.run("--matrix-timeout", "3", faults={VICTIM: "illegal"})
    assert result.ret != 0
    lines = rig.lines()
    before = all_cases[: all_cases.index(VICTIM)]
    assert {i for i, line in lines.items() if line["outcome"] == "passed"} == set(before)
    assert lines[VICTIM]["outcome"] == "error"
    assert {line["outcome"] for i, line in lines.items() if i > VICTIM} == {"lost"}
    result.stdout.fnmatch_lines(["*left the device unusable*run with -n 1*"])


def test_no_error_of_another_case_is_ever_recorded(rig: Any) -> None:
    rig.run("-n2", faults={"r0-cg-decode-a": "illegal", "r0-eager-a": "late", "r0-verify-eager-a": "illegal"})
    assert "fails for the reason of another case" not in rig.path().read_text()
