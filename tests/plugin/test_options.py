"""Options and their ini twins: what is wrong is said at once, by the name of the option."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from dsv4_matrix.context import Options


def test_plugin_load_is_light() -> None:
    heavy = {"torch", "triton", "ruamel", "numpy", "tabulate", "xdist"}
    code = "import sys, dsv4_matrix.plugin; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert heavy & set(done.stdout.split()) == set()
    assert "dsv4_matrix" in done.stdout.split()


def test_require_gpu_says_what_it_saw(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    project.makepyfile(
        stub_machine="""
        from dsv4_matrix.context import Context
        import dsv4_matrix.machine as machine
        del Context.machine
        """
    )
    # the real property, over a machine without a GPU
    (project.path / "conftest.py").write_text(
        "import dsv4_matrix.context as c\nreal = c.Context.__dict__['machine']\nimport stub\nc.Context.machine = real\n"
    )
    for interpreted in (False, True):
        if interpreted:
            monkeypatch.setenv("TRITON_INTERPRET", "1")
        else:
            monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        result = project.runpytest_subprocess("--matrix-require-gpu")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(["ERROR: --matrix-require-gpu: torch * sees no usable GPU*; check nvidia-smi*"])
        assert ("is set by the environment" in result.stderr.str()) == interpreted


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--matrix-backend", "nowhere", "*there is no backend 'nowhere'; installed backends: *triton*"),
        ("--matrix-backend", "stub:Nobody", "*stub has no Nobody; it has *Backend*"),
        ("--matrix-reference", "stub:MATRIX", "*lacks visible, quantise_dequantise, attend, attend_low_precision*"),
    ],
)
def test_what_cannot_be_loaded_is_a_usage_error(project: pytest.Pytester, option: str, value: str, told: str) -> None:
    result = project.runpytest_subprocess(option, value)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {told}"])


def test_without_options_a_wrong_ini_fails_the_collection(project: pytest.Pytester) -> None:
    project.makeini("[pytest]\nmatrix_backend = nowhere\nmatrix_reference = stub:reference")
    result = project.runpytest_subprocess()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["dsv4-matrix: there is no backend 'nowhere'*"])


def test_ini_twins(project: pytest.Pytester) -> None:
    with (project.path / "tox.ini").open("a") as ini:
        ini.write("\nmatrix_cells = r0-eager-good-a\nmatrix_report = out.jsonl\n")
    project.runpytest_subprocess().assert_outcomes(passed=1)
    assert (project.path / "out.jsonl").is_file()


def test_header_says_what_is_under_test(project: pytest.Pytester) -> None:
    result = project.runpytest_subprocess("--matrix-cells", "r0-*")
    result.stdout.fnmatch_lines(
        [
            "dsv4-matrix: */stub.py (sha256 abababababab), 3 cases here, of 5 declared",
            "dsv4-matrix: 2 covered, 1 deferred, 1 not-applicable",
            "dsv4-matrix: backend stub:Backend on CPU interpreter, torch 2.13.0, triton 3.7.1",
        ]
    )


def test_auto_workers_without_a_gpu_are_the_cpus(project: pytest.Pytester) -> None:
    project.makepyfile(
        conftest="""
        import stub
        import dsv4_matrix.machine
        dsv4_matrix.machine.worker_count = lambda: 3
        """
    )
    result = project.runpytest_subprocess("-n", "auto", "--matrix-cells", "r0-eager-good-a")
    result.stdout.fnmatch_lines(["created: 3/3 workers"])


def test_options_of_a_command_are_all_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {name: name for name in ("backend", "reference", "cells", "shard", "timeout", "seeds")}
    made = Options.of_command(matrix="m.yaml", report=tmp_path / "elsewhere/r.jsonl", require_gpu=True, **texts)
    assert (made.matrix, made.report, made.search) == (tmp_path / "m.yaml", tmp_path / "elsewhere/r.jsonl", tmp_path)
    assert {name: getattr(made, name) for name in texts} == texts
    assert made.require_gpu
    bare = Options.of_command()
    told = {field.name: getattr(bare, field.name) for field in fields(bare)}
    # A command is about the matrix though nothing is said: a run of zero cases is a mistake.
    assert {name for name, value in told.items() if value} == {"search", "explicit", "named"}


FAILS = """
from dsv4_matrix.execution import fault
execution.execute = lambda case, setup: fault(case, setup, Outcome.FAILED, "worst row 3")
"""


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(
    ("ini", "given", "told"),
    [
        ("", (), ""),
        ("", ("--matrix", "./my own.yaml"), " --matrix './my own.yaml'"),
        ("matrix_file = my own.yaml", (), " --matrix '../my own.yaml'"),
        ("matrix_file = my own.yaml", ("--matrix=here.yaml",), " --matrix here.yaml"),
        ("matrix_seeds = 3", ("--matrix-shard=1/1", "--matrix-timeout=90", "--matrix-report=out.jsonl"), ""),
    ],
)
def test_what_decides_a_case_is_in_the_command_that_repeats_it(
    project: pytest.Pytester, workers: str, ini: str, given: tuple[str, ...], told: str
) -> None:
    """Wherever it was given; a path in the ini file is from there, and the command from where pytest was started."""
    with (project.path / "stub.py").open("a") as stub:
        stub.write(FAILS)
    with (project.path / "tox.ini").open("a") as file:
        file.write(f"\n{ini}\n")
    below = project.mkdir("below")
    command = [sys.executable, "-m", "pytest", "-n", workers, "--matrix-cells=r0-eager-good-a", *given, ".."]
    done = subprocess.run(command, cwd=below, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    line = "dsv4-matrix run --cells r0-eager-good-a --backend stub:Backend"
    assert f"\n  run      {line}{told} --reference stub:reference\n" in done.stdout


def test_what_the_command_hands_on_is_not_an_option_for_users(project: pytest.Pytester) -> None:
    assert "--matrix-repeat" not in project.runpytest_subprocess("--help").stdout.str()
