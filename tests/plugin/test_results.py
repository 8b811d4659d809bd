"""Results on their way: from a test to the report, alone or from xdist workers, and what must not count as a pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def lines(path: Path) -> dict[str, dict[str, object]]:
    """Report lines by case id, without the header."""
    return {line["id"]: line for line in map(json.loads, path.read_text().splitlines()[1:])}


def test_failure_is_one_screen_without_a_traceback(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_VARIANTS", "good,bad")
    result = project.runpytest_subprocess()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["*_ test_cell[[]r0-eager-bad[]] _*", "case r0-eager-bad", "worst row 3: got 1, want 2"]
    )
    result.stdout.no_fnmatch_line("*execute()*")
    result.stdout.no_fnmatch_line("*Error*")


@pytest.mark.parametrize("workers", ["0", "1", "2"])
def test_report_has_the_same_bytes_for_any_number_of_workers(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    monkeypatch.setenv("STUB_VARIANTS", "good,bad")
    project.runpytest_subprocess("-n", workers, "--matrix-report", "out.jsonl")
    first, *rest = (project.path / "out.jsonl").read_bytes().splitlines()
    assert json.loads(first)["backend"] == "stub:Backend"
    assert rest == [
        b'{"captures":1,"cell":"r0/de-eager","id":"r0-de-eager-refused","kind":"probe","margin":"0.50",'
        b'"outcome":"passed","reason":"","replays":3}',
        b'{"captures":1,"cell":"r0/eager","id":"r0-eager-bad","kind":"case","margin":"7.5","outcome":"failed",'
        b'"reason":"worst row 3","replays":3}',
        b'{"captures":1,"cell":"r0/eager","id":"r0-eager-good","kind":"case","margin":"0.50","outcome":"passed",'
        b'"reason":"","replays":3}',
        b'{"captures":1,"cell":"r4/de-eager","id":"r4-de-eager-refused","kind":"probe","margin":"0.50",'
        b'"outcome":"passed","reason":"","replays":3}',
        b'{"captures":0,"cell":"r4/eager","id":"r4-eager-huge","kind":"case","margin":"","outcome":"not-run",'
        b'"reason":"declared for gpu only","replays":0}',
    ]


TELLING = """
Backend.kernel_paths = staticmethod(lambda device: [
    {"call": "attention", "kernel": os.environ.get("STUB_KERNEL", "slow"), "why": f"as told on {device}"},
])
"""


def add_to_stub(project: pytest.Pytester, code: str) -> None:
    with (project.path / "stub.py").open("a") as stub:
        stub.write(code)


@pytest.mark.parametrize("workers", ["0", "1", "2"])
def test_the_kernels_of_the_backend_stand_in_the_header(project: pytest.Pytester, workers: str) -> None:
    """Asked where cases run: the process that hands them out has no torch."""
    add_to_stub(project, TELLING)
    result = project.runpytest_subprocess("-n", workers, "--matrix-report", "out.jsonl")
    assert result.ret == pytest.ExitCode.OK
    header = json.loads((project.path / "out.jsonl").read_text().splitlines()[0])
    assert header["kernels"] == "slow: attention"


@pytest.mark.parametrize("workers", ["0", "2"])
def test_nonsense_about_kernels_is_bad_input(project: pytest.Pytester, workers: str) -> None:
    add_to_stub(project, "\nBackend.kernel_paths = staticmethod(lambda device: 'fast')\n")
    result = project.runpytest_subprocess("-n", workers, "--matrix-report", "out.jsonl")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    text = "".join((*result.outlines, *result.errlines))
    assert "backend stub:Backend: kernel_paths('cpu') must return a list of mappings, got str" in text


def test_workers_of_different_kernels_are_no_run(project: pytest.Pytester) -> None:
    add_to_stub(project, TELLING + "\nos.environ['STUB_KERNEL'] = os.environ.get('PYTEST_XDIST_WORKER', '')\n")
    result = project.runpytest_subprocess("-n", "2", "--matrix-report", "out.jsonl")
    assert result.ret != pytest.ExitCode.OK
    assert "workers run different kernels, and a report is of one choice" in "".join(
        (*result.outlines, *result.errlines)
    )


def test_telemetry_holds_what_the_report_leaves_out(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_VARIANTS", "good,bad")
    project.runpytest_subprocess("--matrix-report", "out.jsonl")
    told = {
        line["id"]: line for line in map(json.loads, (project.path / "out.telemetry.jsonl").read_text().splitlines())
    }
    assert set(told) == {"r0-eager-good", "r0-eager-bad", "r0-de-eager-refused", "r4-de-eager-refused"}
    assert told["r0-eager-bad"]["message"] == "case r0-eager-bad\nworst row 3: got 1, want 2"
    assert told["r0-eager-bad"]["worker"] == "main"


def test_a_dead_worker_costs_its_case_and_the_run(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_VARIANTS", "good,crash")
    result = project.runpytest_subprocess("-n1", "--matrix-report", "out.jsonl")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    outcomes = {case: line["outcome"] for case, line in lines(project.path / "out.jsonl").items()}
    assert outcomes == {
        "r0-de-eager-refused": "passed",
        "r0-eager-crash": "lost",
        "r0-eager-good": "passed",
        "r4-de-eager-refused": "passed",
        "r4-eager-huge": "not-run",
    }


@pytest.mark.parametrize(
    ("body", "outcome", "reason"),
    [
        ("pass", "not-run", "its test never called matrix_case.execute()"),
        ("pytest.skip('no time')", "not-run", "its test was skipped"),
        ("raise OSError('no disk')", "error", "OSError: no disk"),
        ("matrix_case.execute(); raise OSError('after it')", "error", "OSError: after it"),
        (
            "pytest.fail('Timeout (>1.0s) from pytest-timeout.')",
            "timeout",
            "Failed: Timeout (>1.0s) from pytest-timeout.",
        ),
    ],
)
def test_only_an_executed_case_counts(project: pytest.Pytester, body: str, outcome: str, reason: str) -> None:
    project.makepyfile(test_mine=f"import pytest\n\ndef test_cell(matrix_case):\n    {body}\n")
    result = project.runpytest_subprocess("--matrix-cells", "r0-eager-good-a", "--matrix-report", "out.jsonl")
    line = lines(project.path / "out.jsonl")["r0-eager-good-a"]
    assert (line["outcome"], line["reason"]) == (outcome, reason)
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_a_broken_teardown_takes_the_pass_back(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_mine="""
        import pytest

        @pytest.fixture
        def breaks():
            yield
            raise OSError("late")

        def test_cell(breaks, matrix_case):
            matrix_case.execute()
        """
    )
    project.runpytest_subprocess("--matrix-cells", "r0-eager-good-a", "--matrix-report", "out.jsonl")
    line = lines(project.path / "out.jsonl")["r0-eager-good-a"]
    assert (line["outcome"], line["reason"]) == ("error", "teardown: OSError: late")


@pytest.mark.parametrize("workers", [[], ["-n1"]])
def test_two_tests_for_one_case_are_refused(project: pytest.Pytester, workers: list[str]) -> None:
    project.makepyfile(test_other="def test_again(matrix_case):\n    matrix_case.execute()\n")
    result = project.runpytest_subprocess("--matrix-report", "out.jsonl", *workers)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*case r0-de-eager-refused is generated by two tests, test_mine.py*test_other.py*"])


@pytest.mark.parametrize("where", ["absent/out.jsonl", "folder"])
def test_a_report_that_cannot_be_written_is_said_before_anything_runs(project: pytest.Pytester, where: str) -> None:
    project.mkdir("folder")
    result = project.runpytest_subprocess("--matrix-report", where)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --matrix-report: *"])
    result.stdout.no_fnmatch_line("*passed*")


def test_an_old_report_survives_a_run_that_is_refused(project: pytest.Pytester) -> None:
    (project.path / "out.jsonl").write_text("precious")
    project.runpytest_subprocess("--matrix-report", "out.jsonl", "--matrix-cells", "nothing-like-it")
    assert (project.path / "out.jsonl").read_text() == "precious"
    assert [path.name for path in project.path.iterdir() if path.name.startswith(".out")] == []


def test_junit_carries_the_properties(project: pytest.Pytester) -> None:
    project.runpytest_subprocess("--matrix-cells", "r0-eager-good-a", "--junitxml", "junit.xml")
    text = (project.path / "junit.xml").read_text()
    assert '<property name="matrix_cell" value="r0/eager"' in text
    assert '<property name="matrix_margin" value="0.50"' in text
