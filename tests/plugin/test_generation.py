"""Cases become tests: their ids, their order, their selection, and the ways in which none is a mistake."""

from __future__ import annotations

import pytest


def test_one_test_a_case_with_sorted_ids(project: pytest.Pytester) -> None:
    result = project.runpytest_subprocess("-v")
    result.stdout.fnmatch_lines(
        [
            "test_mine.py::test_cell[[]r0-de-eager-refused[]] PASSED*",
            "test_mine.py::test_cell[[]r0-eager-good-a[]] PASSED*",
            "test_mine.py::test_cell[[]r0-eager-good-b[]] PASSED*",
            "test_mine.py::test_cell[[]r4-de-eager-refused[]] PASSED*",
            "*1 not-run, 4 passed*",
        ]
    )
    assert result.ret == 0


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_same_ids_under_any_hash_seed(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, seed: str) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    result = project.runpytest_subprocess("--collect-only", "-q")
    assert [line.partition("[")[2] for line in result.outlines if line.startswith("test_mine")] == [
        "r0-de-eager-refused]",
        "r0-eager-good-a]",
        "r0-eager-good-b]",
        "r4-de-eager-refused]",
    ]


def test_cells_takes_patterns(project: pytest.Pytester) -> None:
    result = project.runpytest_subprocess("--matrix-cells", "r0-eager-*b, r4-de-*")
    result.assert_outcomes(passed=2)


def test_pattern_without_a_match_names_ids_near_it(project: pytest.Pytester) -> None:
    result = project.runpytest_subprocess("--matrix-cells", "r0-eager-god-a,r0-eager-good-b")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --matrix-cells: no case id matches 'r0-eager-god-a'; near it are r0-eager-good-a*"]
    )


def test_cases_of_another_device_only_are_zero_cases(project: pytest.Pytester) -> None:
    result = project.runpytest_subprocess("--matrix-cells", "r4-eager-huge")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: none of the 1 selected cases is declared for this device (cpu)*"])


@pytest.mark.parametrize("workers", [[], ["-n1"]])
def test_zero_collected_cases_are_an_error_not_a_skip(project: pytest.Pytester, workers: list[str]) -> None:
    project.makepyfile(test_mine="def test_nothing(): ...")
    result = project.runpytest_subprocess("--matrix-cells", "r0-*", *workers)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "zero cases were collected" in result.stdout.str() + result.stderr.str()


@pytest.mark.parametrize("workers", [[], ["-n1"]])
def test_plain_runs_of_other_tests_are_left_alone(project: pytest.Pytester, workers: list[str]) -> None:
    project.makepyfile(
        conftest="", test_mine="import pytest\n@pytest.mark.parametrize('a', [1])\ndef test_nothing(a): ..."
    )
    project.makeini("[pytest]\naddopts = -p no:cacheprovider")
    (project.path / "matrix.yaml").write_text("matrices: of another kind\n")
    result = project.runpytest_subprocess(*workers)
    assert result.ret == 0
    result.stdout.no_fnmatch_line("*cases here*")


def test_own_parameters_may_stand_beside_the_case(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_mine="""
        import pytest

        @pytest.mark.parametrize("salt", ["x-y"])
        def test_cell(matrix_case, salt):
            matrix_case.execute()
        """
    )
    result = project.runpytest_subprocess("-n1", "--matrix-report", "report.jsonl")
    result.assert_outcomes(passed=4)
    assert (project.path / "report.jsonl").read_text().count('"outcome":"passed"') == 4
