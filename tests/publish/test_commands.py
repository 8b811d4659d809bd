"""plan, merge, summary, html and junit as commands: exit status, what they print and write, and without torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4_matrix.cli import main
from dsv4_matrix.declaration.model import Matrix
from dsv4_matrix.report import canonical, telemetry
from dsv4_matrix.report.result import Outcome, Report
from dsv4_matrix.report.telemetry import Telemetry, telemetry_path

Maker = Callable[..., Report]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(matrix: Matrix, command: str, *arguments: object) -> int:
    return main([command, "--matrix", matrix.path, *map(str, arguments)])


def write(report: Report, path: Path, messages: dict[str, str] | None = None) -> Path:
    canonical.write(report, path)
    told = messages or {}
    ran = [result.id for result in report.results if result.outcome is not Outcome.NOT_RUN]
    telemetry.write([Telemetry(i, 1.0, "gw0", "host", told.get(i, "")) for i in ran], telemetry_path(path))
    return path


@pytest.fixture
def shards(make: Maker, folder: Path) -> list[Path]:
    return [write(make("gpu", f"{k}/3"), folder / f"shard-{k}.jsonl") for k in (1, 2, 3)]


def test_plan_lists_each_case_once(matrix: Matrix, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(matrix, "plan", "--shards", 3, "--workers", 2, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert [shard["shard"] for shard in plan["shards"]] == ["1/3", "2/3", "3/3"]
    cases = [case for shard in plan["shards"] for cell in shard["cells"] for case in cell["cases"]]
    assert sorted(cases) == [case.id for case in matrix.cases("gpu")]
    for shard in plan["shards"]:
        assert len(shard["workers"]) == 2
        assert sorted(i for place in shard["workers"] for i in place) == sorted(cell["id"] for cell in shard["cells"])


def test_plan_says_the_same_in_words(matrix: Matrix, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(matrix, "plan", "--shards", 2, "--device", "cpu", "--cells", "r4-*") == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if not line.startswith(" ")]
    assert [head.partition(":")[0] for head in heads] == ["shard 1/2", "shard 2/2"]
    counted = [re.search(r": (\d) covered cells?(?:, (\d) cells? with a probe)?; ", head) for head in heads]
    covered = [bool(cell.variants) for cell in matrix.cells if cell.ratio == 4]
    assert sum(int(found.group(1)) for found in counted if found) == covered.count(True)
    assert sum(int(found.group(2) or 0) for found in counted if found) == covered.count(False)
    listed = {line.split()[0] for line in lines if line.startswith(" ")}
    assert listed == {cell.id for cell in matrix.cells if cell.ratio == 4}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shards", 99], " cells with a probe, the refusals: none of these is divided, so "),
        (["--shards", 2, "--cells", "refusal-*"], "2 shards for the refusals: none"),
        (["--shards", 0], "plan: got --shards 0, --workers 1; give at least one shard"),
        (["--shards", 1, "--workers", 0], "got --shards 1, --workers 0; give at least one shard and one worker"),
        (["--shards", 1, "--cells", "r9-*"], "no case id matches 'r9-*'"),
    ],
)
def test_plans_that_make_no_sense_are_bad_input(
    matrix: Matrix, arguments: list[object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(matrix, "plan", *arguments) == 2
    assert message in capsys.readouterr().err


def test_merge_writes_report_telemetry_and_evidence(
    make: Maker, matrix: Matrix, folder: Path, shards: list[Path]
) -> None:
    everything = sorted(folder.glob("*.jsonl"))  # as a shell gives it, telemetry included
    assert run(matrix, "merge", *everything, "--out", "all.jsonl", "--record", "evidence") == 0
    assert (folder / "all.jsonl").read_bytes() == canonical.dumps(make("gpu"))
    assert (folder / "evidence" / "test-gpu.jsonl").read_bytes() == (folder / "all.jsonl").read_bytes()
    assert len(telemetry.read(folder / "all.telemetry.jsonl")) == len(matrix.cases("gpu"))


def test_merge_without_a_shard_fails_names_the_cases_and_records_nothing(
    matrix: Matrix, folder: Path, shards: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(matrix, "merge", *shards[:2], "--out", "all.jsonl", "--record", "evidence") == 1
    err = capsys.readouterr().err
    third = {r.cell or "refusals" for r in canonical.read(shards[2]).results if r.outcome is Outcome.PASSED}
    assert len(err.splitlines()) == len(third) + 2, "a head, whole cells one a line, and what became of --record"
    assert all(f"\n  {cell} (" in err or f"\n  {cell.replace('/', '-')}-refused\n" in err for cell in third)
    assert "evidence not recorded" in err
    assert not (folder / "evidence").exists()
    assert (folder / "all.jsonl").exists(), "what there is can still be shown"


@pytest.mark.parametrize("reason", ["not selected in this run", "in another shard"])
def test_merge_tells_a_selection_from_a_missing_shard(
    make: Maker, matrix: Matrix, folder: Path, case_id: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(make("gpu", change={case_id: {"outcome": Outcome.NOT_RUN, "reason": reason}}), folder / "a.jsonl")
    assert run(matrix, "merge", path) == 1
    told = "1 of the missing were left out by --cells" in capsys.readouterr().err
    assert told == (reason == "not selected in this run")


def test_merge_names_every_case_for_programs(
    make: Maker, matrix: Matrix, folder: Path, shards: list[Path], case_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    third = [r.id for r in canonical.read(shards[2]).results if r.outcome is Outcome.PASSED]
    told = {"outcome": Outcome.FAILED, "reason": "worst row\nmore"}
    reports = [make("gpu", f"{k}/3") for k in (1, 2)]
    whole = [r for report in reports for r in report.results if r.outcome is Outcome.PASSED]
    write(make("gpu", "1/3", change={whole[0].id: told}), shards[0])
    assert run(matrix, "merge", *shards[:2], "--json") == 1
    assert json.loads(capsys.readouterr().out) == {
        "reports": 2,
        "complete": False,
        "passed": len(whole) - 1,
        "short": [{"id": whole[0].id, "outcome": "failed", "reason": "worst row"}],
        "missing": sorted(third),
        "lost": [],
        "undeclared": [],
    }
    write(make("gpu", "1/3"), shards[0])
    assert run(matrix, "merge", *shards, "--json") == 0
    complete = json.loads(capsys.readouterr().out)
    assert complete["complete"]
    assert not complete["missing"]


@pytest.mark.parametrize("outcome", [o for o in Outcome if o not in (Outcome.PASSED, Outcome.NOT_RUN)])
def test_merge_is_red_if_a_case_fell_short(
    make: Maker, matrix: Matrix, folder: Path, case_id: str, outcome: Outcome, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = write(make("gpu", change={case_id: {"outcome": outcome, "reason": "because"}}), folder / "a.jsonl")
    assert run(matrix, "merge", whole) == 1
    assert f"{outcome} {case_id}: because" in capsys.readouterr().out


def test_merge_of_one_shard_twice_fails_and_writes_nothing(
    matrix: Matrix, folder: Path, shards: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(matrix, "merge", shards[0], shards[0], "--out", "all.jsonl") == 1
    assert "was run twice" in capsys.readouterr().err
    assert not (folder / "all.jsonl").exists()


@pytest.mark.parametrize("content", ["", "no report\n", None])
def test_files_that_are_no_report_are_bad_input(matrix: Matrix, folder: Path, content: str | None) -> None:
    path = folder / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    for arguments in (["merge", path], ["summary", path], ["html", path, "--out", "x"], ["junit", path, "--out", "x"]):
        assert run(matrix, *arguments) == 2  # type: ignore[arg-type]
    assert not (folder / "x").exists()


def test_telemetry_alone_is_bad_input(
    matrix: Matrix, folder: Path, shards: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(matrix, "merge", telemetry_path(shards[0])) == 2
    assert "only telemetry is named" in capsys.readouterr().err


def test_damaged_telemetry_is_said_with_its_line(
    matrix: Matrix, folder: Path, shards: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    telemetry_path(shards[0]).write_text('{"id": "x"}\n')
    assert run(matrix, "summary", shards[0]) == 2
    assert "shard-1.telemetry.jsonl:1: not telemetry" in capsys.readouterr().err


def test_messages_come_from_the_telemetry_beside_the_report(
    make: Maker, matrix: Matrix, folder: Path, case_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    red = make("gpu", change={case_id: {"outcome": Outcome.ERROR, "reason": "short"}})
    path = write(red, folder / "a.jsonl", {case_id: "the whole screen"})
    assert run(matrix, "summary", path, "--title", "GPU") == 0
    out = capsys.readouterr().out
    assert out.startswith("## ❌ GPU: ")
    assert "the whole screen" in out
    for command in ("html", "junit"):
        assert run(matrix, command, path, "--out", f"a.{command}") == 0
        assert "the whole screen" in (folder / f"a.{command}").read_text()
    telemetry_path(path).unlink()
    assert run(matrix, "html", path, "--out", "b.html") == 0
    assert "<pre>short</pre>" in (folder / "b.html").read_text()


def test_a_page_of_two_shards_is_refused_with_the_way_out(
    matrix: Matrix, folder: Path, shards: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(matrix, "html", *shards, "--out", "x.html") == 2
    assert "dsv4-matrix merge" in capsys.readouterr().err


LIGHT = """
import sys


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton", "numpy", "pytest", "xdist", "execnet"):
            raise ImportError(f"{name} is not installed here")


sys.meta_path.insert(0, Blocked())
from dsv4_matrix.cli import main

for line in sys.stdin.read().splitlines():
    assert main(line.split("|")) == 0, line
"""


def test_a_machine_without_torch_plans_merges_and_renders(matrix: Matrix, folder: Path, shards: list[Path]) -> None:
    commands = [
        ["plan", "--shards", "3"],
        ["merge", *map(str, shards), "--out", "all.jsonl", "--record", "evidence"],
        ["summary", "all.jsonl"],
        ["html", "all.jsonl", "--out", "all.html"],
        ["junit", "all.jsonl", "--out", "all.xml"],
    ]
    lines = "\n".join("|".join([name, "--matrix", matrix.path, *rest]) for name, *rest in commands)
    done = subprocess.run([sys.executable, "-c", LIGHT], input=lines, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
