"""``run_matrix`` from an empty folder: exit status, what is printed, and when evidence is recorded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4_matrix.report import canonical

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(project: pytest.Pytester, tmp_path: Path) -> Run:
    """Call ``run_matrix(**arguments)`` in a fresh interpreter, where the stubs stand in for a real matrix."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    (stubs / "stub.py").write_text((project.path / "stub.py").read_text())
    (stubs / "sitecustomize.py").write_text("import stub\n")  # in xdist's workers as well
    empty = tmp_path / "empty"
    empty.mkdir()

    def call(variants: str = "good-a,good-b", environment: dict[str, str] | None = None, **arguments: object):
        given = {"backend": "stub:Backend", "reference": "stub:reference", "workers": "0", **arguments}
        code = f"import sys; from dsv4_matrix.session import run_matrix; sys.exit(run_matrix(**{given!r}))"
        variables = {**os.environ, "PYTHONPATH": str(stubs), "STUB_VARIANTS": variants, **(environment or {})}
        return subprocess.run(
            [sys.executable, "-c", code], cwd=empty, env=variables, capture_output=True, text=True, timeout=120
        )

    return call


def test_a_good_run_ends_with_the_matrix(run: Run) -> None:
    done = run()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == (
        "4 cases, backend stub:Backend, CPU interpreter, torch 2.13.0, triton 3.7.1, one process"
    )
    assert done.stdout.endswith(
        "mode      ratio 0    ratio 4\n"
        "--------  ---------  --------------\n"
        "Eager     2/2 0.50   1 not run\n"
        "DE eager  deferred   not-applicable\n"
        "\n"
        "4 of 4 selected cases passed; 1 declared for gpu only\n"
    )


def test_a_run_of_some_cases_shows_their_modes_only(run: Run) -> None:
    assert run(cells="r0-eager-good-a").stdout.endswith(
        "mode    ratio 0              ratio 4\n"
        "------  -------------------  ---------\n"
        "Eager   1/2 0.50, 1 not run  1 not run\n"
        "\n"
        "1 of 1 selected cases passed; 1 declared for gpu only, 3 not selected in this run\n"
    )


@pytest.mark.parametrize(
    ("cells", "shown"), [("r0-eager-print-a", ["printed by r0-eager-print-a"]), ("r0-eager-*", [])]
)
def test_a_run_of_one_case_shows_what_its_backend_prints(run: Run, cells: str, shown: list[str]) -> None:
    done = run("print-a,print-b", cells=cells, workers=None)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("printed")] == shown


@pytest.mark.parametrize("cells", ["r0-eager-hang", "r0-eager-*"], ids=["one case", "one cell"])
def test_a_timeout_is_held_where_one_process_would_do(run: Run, cells: str) -> None:
    done = run("good,hang", cells=cells, workers=None, timeout="3")
    assert done.returncode == 1
    assert "no result within 3 s; its worker was ended and replaced" in done.stdout


def test_a_timeout_that_nothing_can_hold_is_bad_input(run: Run) -> None:
    done = run(timeout="3", workers="0")
    assert done.returncode == 2
    assert "--timeout: only a worker can be ended, and -n 0 has none; say -n 1, or leave one out" in done.stderr
    assert run(workers="0").returncode == 0


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_fell_short_stands_above_the_table(run: Run, workers: str) -> None:
    done = run("good,bad,raise", workers=workers)
    assert done.returncode == 1
    failed, errors, table = (
        done.stdout.index(text)
        for text in ("case r0-eager-bad\nworst row 3", "RuntimeError: broken", "mode      ratio 0")
    )
    assert failed < errors < table
    assert "1/3 7.5, 1 failed, 1 error" in done.stdout
    assert "3 of 5 selected cases passed" in done.stdout


def test_progress_is_shown(run: Run) -> None:
    assert [line for line in run("good,bad").stdout.splitlines() if "short" in line] == [
        "1/4 cases, 0 short",
        "2/4 cases, 1 short",
        "3/4 cases, 1 short",
        "4/4 cases, 1 short",
    ]


def test_many_failures_stay_readable(run: Run) -> None:
    done = run(",".join(f"bad-{letter}" for letter in "abcdefghij"))
    assert done.stdout.count("worst row 3: got 1") == 8
    assert "and 2 more:\n  failed r0-eager-bad-i: worst row 3\n  failed r0-eager-bad-j: worst row 3\n" in done.stdout


def test_the_users_pytest_configuration_is_left_out(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty/pytest.ini").write_text("[pytest]\naddopts = --no-such-option\nmatrix_cells = nothing\n")
    (tmp_path / "empty/conftest.py").write_text("raise SystemExit('loaded')")
    done = run(environment={"PYTEST_ADDOPTS": "--no-such-option", "PYTEST_PLUGINS": "no_such_plugin"})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_complete_run_is_recorded(run: Run, tmp_path: Path, workers: str) -> None:
    done = run("good,bad", record="evidence", workers=workers)
    assert done.returncode == 1, "a run with a failure is recorded as such, and still fails"
    report = canonical.read(tmp_path / "empty/evidence/cpu-interpreter.jsonl")
    assert {result.id: result.outcome.value for result in report.results} == {
        "r0-de-eager-refused": "passed",
        "r0-eager-bad": "failed",
        "r0-eager-good": "passed",
        "r4-de-eager-refused": "passed",
        "r4-eager-huge": "not-run",
    }
    assert [path.name for path in (tmp_path / "empty/evidence").iterdir()] == ["cpu-interpreter.jsonl"]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_evidence_holds_the_kernels_that_served(run: Run, tmp_path: Path, workers: str) -> None:
    with (tmp_path / "stubs/stub.py").open("a") as stub:
        stub.write(
            "\nBackend.kernel_paths = staticmethod(lambda device: "
            "[{'call': 'attention', 'kernel': 'fast', 'why': f'as told on {device}'}])\n"
        )
    done = run(record="evidence", workers=workers)
    assert done.returncode == 0, done.stderr
    assert "\nfast serves attention: as told on cpu\n" in done.stdout
    header = canonical.read(tmp_path / "empty/evidence/cpu-interpreter.jsonl").header
    assert header.kernels == "fast: attention"


def test_a_part_of_the_matrix_is_not_evidence(run: Run, tmp_path: Path) -> None:
    done = run(record="evidence", cells="r0-*")
    assert done.returncode == 2
    assert "--record: evidence is of the whole matrix" in done.stderr
    assert not (tmp_path / "empty/evidence").exists()


def test_a_lost_case_is_not_evidence(run: Run, tmp_path: Path) -> None:
    done = run("good,crash", record="evidence", workers="1")
    assert done.returncode == 1
    assert "evidence not recorded: these cases did not run: r0-eager-crash" in done.stderr
    assert list((tmp_path / "empty/evidence").iterdir()) == []


def test_sources_that_change_under_way_are_not_evidence(run: Run, tmp_path: Path) -> None:
    done = run("good,touch", record="evidence", matrix=str(tmp_path / "stubs/stub.py"))
    assert done.returncode == 1
    assert "evidence not recorded: the sources changed while the matrix ran" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"cells": "r9-*"}, "run: --cells: no case id matches 'r9-*'"),
        ({"backend": "nowhere"}, "there is no backend 'nowhere'; installed backends"),
        ({"report": "absent/out.jsonl"}, "there is no directory"),
        ({"workers": "many"}, "-n many: give 'auto' or a number of processes"),
        ({"record": "file"}, "--record file: cannot make the folder: File exists"),
    ],
)
def test_bad_input_is_exit_status_two(run: Run, tmp_path: Path, arguments: dict[str, str], told: str) -> None:
    (tmp_path / "empty/file").write_text("")
    done = run(**arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("dsv4-matrix run: ")
    assert told in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_backend_that_does_not_import_is_bad_input_wherever_it_is_found(run: Run, workers: str) -> None:
    """With workers, this process imports no backend, and one of them is the first to know."""
    done = run(backend="absent_module:Backend", workers=workers)
    assert done.returncode == 2
    told = "dsv4-matrix run: backend 'absent_module:Backend': module absent_module does not import"
    assert [line[: len(told)] for line in done.stderr.splitlines()] == [told]
    assert "selected cases passed" not in done.stdout


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("role", ["backend", "reference"])
def test_code_that_exits_at_import_is_one_line_of_bad_input(run: Run, tmp_path: Path, role: str, workers: str) -> None:
    (tmp_path / "empty/leaves.py").write_text("import sys\n\nsys.exit('bye')\n")
    done = run(**{role: "leaves:Backend"}, workers=workers)
    told = f"{role} 'leaves:Backend': module leaves does not import: it ended in SystemExit('bye') (leaves.py:3)"
    assert (done.returncode, done.stderr) == (2, f"dsv4-matrix run: {told}\n")
    assert "INTERNALERROR" not in done.stdout


@pytest.mark.parametrize("workers", ["0", "1"])
def test_an_interrupt_names_the_case_that_ran(run: Run, workers: str) -> None:
    done = run("good-a,interrupts,zero", workers=workers)
    assert (done.returncode, done.stderr) == (130, "dsv4-matrix run: interrupted in case r0-eager-interrupts\n")


@pytest.mark.parametrize(("case", "status", "own"), [("leaves", 1, 0), ("crash", 3, 3)])
def test_a_case_that_ends_the_only_process_is_told_and_no_pass(run: Run, case: str, status: int, own: int) -> None:
    done = run(f"good-a,{case},zero")
    told = f"case r0-eager-{case} ended this process with status {own}; run with -n 1, where it ends a worker"
    assert (done.returncode, done.stderr) == (status, f"dsv4-matrix: {told}\n")


def test_a_case_that_ends_its_worker_with_status_0_is_lost(run: Run) -> None:
    done = run("good-a,leaves", workers="1")
    assert done.returncode == 1
    assert "lost" in done.stdout


def test_a_fork_of_a_case_may_end(run: Run) -> None:
    assert run("forks,good-a").returncode == 0


def test_an_interrupt_from_outside_names_the_case_of_a_worker(run: Run) -> None:
    done = run("good-a,signals,zero", workers="1")
    assert (done.returncode, done.stderr) == (130, "dsv4-matrix run: interrupted in case r0-eager-signals\n")
