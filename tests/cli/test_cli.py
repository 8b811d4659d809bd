"""The command's answers, exit statuses and streams; it never loads what runs kernels, and never shows a traceback."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dsv4_matrix.declaration import listing

REPOSITORY = Path(__file__).parents[2]
Cli = Callable[..., Any]

TEXT = {"type": "string", "minLength": 1}
LENGTHS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
LIST_SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["cells"],
    "properties": {
        "cells": {
            "type": "array",
            "minItems": 36,
            "maxItems": 36,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["id", "ratio", "mode", "state", "reason", "probe", "variants"],
                "properties": {
                    "id": {"type": "string", "pattern": "^r(0|4|128)/[a-z0-9-]+$"},
                    "ratio": {"enum": [0, 4, 128]},
                    "mode": TEXT,
                    "state": {"enum": ["covered", "production-unreachable", "blocked", "deferred", "not-applicable"]},
                    "reason": {"anyOf": [TEXT, {"type": "null"}]},
                    "probe": {
                        "anyOf": [
                            {
                                "type": "object",
                                "additionalProperties": False,
                                "required": ["site", "raises", "match"],
                                "properties": {"site": TEXT, "raises": TEXT, "match": TEXT},
                            },
                            {"type": "null"},
                        ]
                    },
                    "variants": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["case_id", "seed", "name", "forward", "prefix_lens", "devices", "cost"],
                            "properties": {
                                "case_id": {"type": "string", "pattern": "^[a-z0-9-]+$"},
                                "seed": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
                                "prefix_lens": LENGTHS,
                                "extend_lens": LENGTHS,
                                "replays": {"type": "array", "items": LENGTHS},
                                "place": False,
                            },
                        },
                    },
                },
                "if": {"properties": {"state": {"const": "covered"}}},
                "then": {"properties": {"variants": {"minItems": 1}, "probe": {"type": "null"}}},
                "else": {"properties": {"variants": {"maxItems": 0}, "probe": {"type": "object"}, "reason": TEXT}},
            },
        }
    },
}


def test_check_counts_what_is_declared(cli: Cli, small_matrix: Path) -> None:
    ran = cli("check", "--matrix", str(small_matrix))
    assert (ran.status, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0] == str(small_matrix)
    assert lines[1] == "4 cells: 2 covered, 1 blocked, 1 deferred"
    assert lines[2] == "6 cases: 3 variants, 2 probes, 1 refusals"
    assert [line.partition(":")[0] for line in lines[3:]] == ["CPU", "GPU"]


def test_check_takes_the_repositorys_own_file(cli: Cli) -> None:
    ran = cli("check")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith(f"{REPOSITORY / 'matrix.yaml'}\n36 cells: ")


@pytest.mark.parametrize(
    "command", [["check"], ["list"], ["list", "--json"], ["explain", "r0/eager"], ["table", "--check"]]
)
def test_mistakes_go_to_stderr_with_status_2(
    cli: Cli, broken_matrix: tuple[Path, list[str]], command: list[str]
) -> None:
    path, messages = broken_matrix
    ran = cli(*command, "--matrix", str(path))
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.splitlines() == [*messages, "2 mistakes in the declaration"]


@pytest.mark.parametrize(
    "argv",
    [["lst"], [], ["list", "--jso"], ["explain"], ["table"], ["table", "--check", "--write"], ["run", "--cell", "x"]],
)
def test_bad_arguments_are_status_2(cli: Cli, argv: list[str]) -> None:
    ran = cli(*argv)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("usage: dsv4-matrix")


def test_an_unknown_argument_shows_the_usage_of_its_command(cli: Cli) -> None:
    err = cli("junit", "a.jsonl", "b.jsonl", "--out", "a.xml").err
    assert err.startswith("usage: dsv4-matrix junit [-h] [--matrix PATH] --out PATH REPORT\n")
    assert err.endswith("dsv4-matrix junit: error: unrecognized arguments: b.jsonl\n")


@pytest.mark.parametrize("content", [b"", b"\x00\xff", b"a: &a [*a]", b"- 1"], ids=["empty", "binary", "alias", "list"])
def test_hostile_file_is_status_2(cli: Cli, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.yaml"
    path.write_bytes(content)
    ran = cli("check", "--matrix", str(path))
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(f"{path}:1:")


def test_list_json_has_the_agreed_form(cli: Cli) -> None:
    ran = cli("list", "--json")
    assert (ran.status, ran.err) == (0, "")
    jsonschema.validate(json.loads(ran.out), LIST_SCHEMA)


def test_list_schema_can_fail(cli: Cli) -> None:
    listed = json.loads(cli("list", "--json").out)
    listed["cells"][0]["extra"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(listed, LIST_SCHEMA)


def test_list_names_every_case_once(cli: Cli) -> None:
    from dsv4_matrix.declaration import load_matrix

    ids = [case.id for case in load_matrix(REPOSITORY / "matrix.yaml").cases()]
    listed = [line.strip() for line in cli("list").out.splitlines() if line.startswith("  ")]
    assert sorted(listed) == ids
    by_json = [v["case_id"] for cell in json.loads(cli("list", "--json").out)["cells"] for v in cell["variants"]]
    assert sorted(by_json) == [case_id for case_id in ids if case_id in set(by_json)]
    assert len(by_json) == len(set(by_json))


def test_list_is_the_same_in_every_process(fresh: Cli) -> None:
    code = "import sys; from dsv4_matrix.cli import main; sys.exit(main(sys.argv[1:]))"
    outputs = {fresh(code, "list", "--json", PYTHONHASHSEED=seed).out for seed in ("0", "1")}
    assert len(outputs) == 1
    assert json.loads(outputs.pop())


@pytest.mark.parametrize(
    "argv",
    [["list"], ["list", "--json"], ["check"], ["explain", "r4/verify-cg"], ["table", "--check"], ["--version"]],
    ids=" ".join,
)
def test_nothing_that_runs_kernels_is_imported(fresh: Cli, argv: list[str], tmp_path: Path) -> None:
    if argv[0] == "table":
        readme = tmp_path / "README.md"
        blocks = [f"<!-- {name}:{edge} -->\n" for name in ("matrix", "evidence") for edge in ("begin", "end")]
        readme.write_text("".join(blocks), encoding="utf-8")
        argv = [*argv, "--readme", str(readme)]
    code = (
        "import sys\n"
        "from dsv4_matrix.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'triton', 'numpy', 'pytest', 'jsonschema'} & set(sys.modules)\n"
        "print('HEAVY', sorted(heavy), file=sys.stderr)\n"
    )
    ran = fresh(code, *argv)
    assert ran.err == "HEAVY []\n"
    assert ran.out


def test_explain_covered_cell(cli: Cli, small_matrix: Path) -> None:
    from dsv4_matrix.declaration import load_matrix

    ran = cli("explain", "r0/eager", "--matrix", str(small_matrix))
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith("r0/eager: covered\n  Eager, ratio 0: ")
    cases = [case for case in load_matrix(small_matrix).cases() if case.cell_id == "r0/eager"]
    assert len(cases) == 2
    for case in cases:
        assert case.variant
        assert f"\n{case.id}\n" in ran.out
        assert f"seed {case.seed}, cost {case.variant.cost}, " in ran.out
    assert ran.out.endswith(f"run it: dsv4-matrix run --cells 'r0-eager-*' --matrix {shlex.quote(str(small_matrix))}\n")


def test_explain_shows_the_kernels_of_what_is_covered(cli: Cli, small_matrix: Path) -> None:
    shown, where = "kernels of triton, as it declares them:", ("--matrix", str(small_matrix))
    covered = cli("explain", "r0/eager", *where).out
    assert f"\n{shown}\n  attention: hopper on sm90" in covered
    assert "\n  sparse-prefill: portable on " in covered
    assert shown in cli("explain", "r0-eager-decode", *where).out
    assert shown not in cli("explain", "r4/eager", *where).out


def test_a_broken_table_of_kernels_is_bad_input(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dsv4_matrix.report import kernels

    path = tmp_path / kernels.TABLE
    path.write_text("{}", encoding="utf-8")
    monkeypatch.setattr(kernels, "_beside", lambda module: path)
    ran = cli("explain", "r0/eager")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err == f"dsv4-matrix explain: {path}: must be a list, got dict\n"


def test_explain_refused_cell(cli: Cli, small_matrix: Path) -> None:
    ran = cli("explain", "r4/verify-cg", "--matrix", str(small_matrix))
    assert "r4/verify-cg: blocked" in ran.out
    assert "reason: Verify needs a selection for each row." in ran.out
    assert "probe: own-step (" in ran.out
    assert "must raise ValueError with a message that matches 'selection'" in ran.out
    assert shlex.split(ran.out.splitlines()[-1])[-3:] == ["r4-verify-cg-refused", "--matrix", str(small_matrix)]


@pytest.mark.parametrize("name", ["r0-verify-cg-chain", "refusal-page-size", "r4-eager-refused"])
def test_explain_takes_a_case_id(cli: Cli, small_matrix: Path, name: str) -> None:
    ran = cli("explain", name, "--matrix", str(small_matrix))
    assert ran.status == 0
    assert ran.out.startswith(f"{name}\n")
    assert shlex.split(ran.out.splitlines()[-1])[-3:] == [name, "--matrix", str(small_matrix)]


def test_explain_names_a_matrix_as_it_was_given_and_none_that_was_found(
    cli: Cli, small_matrix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "run it: dsv4-matrix run --cells 'refusal-page-size'"
    assert cli("explain", "refusal-page-size").out.splitlines()[-1] == line
    monkeypatch.chdir(small_matrix.parent)
    small_matrix.rename("my own.yaml")
    ran = cli("explain", "refusal-page-size", "--matrix", "./my own.yaml")
    assert ran.out.splitlines()[-1] == f"{line} --matrix './my own.yaml'"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("r4/verfy-cg", "r4/verify-cg"),
        ("R4/EAGER", "r4/eager"),
        ("r0-verify-cg-chian", "r0-verify-cg-chain"),
        ("r4", "r4/eager, r4/verify-cg"),
        ("R4/*", "r4/"),
    ],
)
def test_unknown_cell_names_what_is_near(cli: Cli, small_matrix: Path, name: str, near: str) -> None:
    ran = cli("explain", name, "--matrix", str(small_matrix))
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(f"dsv4-matrix explain: no cell or case '{name}'; near it: {near}")


def test_more_names_than_are_told_are_counted(cli: Cli) -> None:
    assert re.fullmatch(r".*; near it: (r4/\S+, ){4}r4/\S+ and \d\d more\n", cli("explain", "r4").err)


def test_explain_forms_its_text_once(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is looked up before a backend is loaded, and that takes no text."""
    formed = []
    text = listing.explain_text
    monkeypatch.setattr(listing, "explain_text", lambda *given: formed.append(given) or text(*given))
    assert cli("explain", "r4/eager").status == 0
    assert len(formed) == 1
    assert cli("explain", "r4/eagre", "--backend", "no_such_module:Backend").err.startswith(
        "dsv4-matrix explain: no cell"
    )


def test_unknown_cell_with_nothing_near(cli: Cli) -> None:
    assert cli("explain", "zzzzz").err.endswith("no cell or case 'zzzzz'; see them with 'dsv4-matrix list'\n")


def test_run_lines_select_the_cell_and_nothing_else(cli: Cli) -> None:
    """What explain says to paste is tried on the selection that run uses."""
    from dsv4_matrix.declaration import load_matrix
    from dsv4_matrix.selection import select

    matrix = load_matrix(REPOSITORY / "matrix.yaml")
    for cell in matrix.cells:
        command = shlex.split(cli("explain", cell.id).out.splitlines()[-1].removeprefix("run it: "))
        assert command[:3] == ["dsv4-matrix", "run", "--cells"]
        assert {case.cell_id for case in select(matrix.cases(), command[3])} == {cell.id}


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    path = tmp_path / "README.md"
    path.write_text(
        "# Title\n<!-- matrix:begin --><!-- matrix:end -->\ntext\n<!-- evidence:begin --><!-- evidence:end -->\n",
        encoding="utf-8",
    )
    return path


def test_table_is_written_then_holds_then_drifts(cli: Cli, readme: Path) -> None:
    behind = cli("table", "--check", "--readme", str(readme))
    assert (behind.status, behind.err) == (1, "")
    assert behind.out.startswith(f"--- {readme}\n+++ ")
    command = f"dsv4-matrix table --write --readme {shlex.quote(str(readme))}"
    assert behind.out.endswith(f"is behind; bring it up to date with: {command}\n"), "the same file"

    written = cli("table", "--write", "--readme", str(readme))
    assert (written.status, written.out) == (0, f"{readme}: brought up to date\n")
    assert cli("table", "--check", "--readme", str(readme)) == (0, "", "")
    assert cli("table", "--write", "--readme", str(readme)).out == f"{readme}: is up to date\n"

    text = readme.read_text(encoding="utf-8")
    readme.write_text(text.replace("| 0       | ✓ ", "| 0       | ✓ 1", 1), encoding="utf-8")
    drifted = cli("table", "--check", "--readme", str(readme))
    assert drifted.status == 1
    assert drifted.out.count("\n-| 0 ") == 1


def test_table_follows_the_declaration(cli: Cli, readme: Path, tmp_path: Path) -> None:
    cli("table", "--write", "--readme", str(readme))
    changed = tmp_path / "matrix.yaml"
    text = (REPOSITORY / "matrix.yaml").read_text(encoding="utf-8")
    changed.write_text(text.replace("title: CG decode", "title: Graph decode"), encoding="utf-8")
    ran = cli("table", "--check", "--matrix", str(changed), "--readme", str(readme))
    assert ran.status == 1
    assert "Graph decode" in ran.out


def test_table_without_markers_is_bad_input(cli: Cli, readme: Path) -> None:
    readme.write_text("# Title\n", encoding="utf-8")
    for option in ("--check", "--write"):
        ran = cli("table", option, "--readme", str(readme))
        assert (ran.status, ran.out) == (2, "")
        assert ran.err.startswith(f"dsv4-matrix table: {readme}: no <!-- ")
    assert readme.read_text(encoding="utf-8") == "# Title\n"


def test_table_with_broken_evidence_is_bad_input(cli: Cli, readme: Path, tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    evidence.mkdir()
    (evidence / "device.jsonl").write_text("{broken\n", encoding="utf-8")
    ran = cli("table", "--check", "--readme", str(readme), "--evidence", str(evidence))
    assert (ran.status, ran.out) == (2, "")
    assert str(evidence / "device.jsonl") in ran.err


def test_run_hands_its_options_over(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_matrix import session

    signature = inspect.signature(session.run_matrix)
    calls = []

    def run_matrix(**options: object) -> int:
        signature.bind(**options)
        calls.append(options)
        return 1

    monkeypatch.setattr(session, "run_matrix", run_matrix)
    assert cli("run").status == 1
    assert cli(
        *("run", "--matrix", "m", "--backend", "b:B", "--reference", "r", "--cells", "c", "-n", "2"),
        *("--report", "p", "--record", "d", "--require-gpu", "--shard", "1/2", "--timeout", "9", "--seeds", "3"),
    ).status == 1  # fmt: skip
    given = {
        "matrix": "m",
        "backend": "b:B",
        "reference": "r",
        "cells": "c",
        "workers": "2",
        "report": "p",
        "record": "d",
        "shard": "1/2",
        "timeout": "9",
        "seeds": "3",
    }
    assert calls == [dict.fromkeys(given) | {"require_gpu": False}, given | {"require_gpu": True}]


def test_reader_that_goes_away_is_no_error() -> None:
    code = "import sys; from dsv4_matrix.cli import main; sys.exit(main(['list', '--json']))"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == b"{\n"
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (141, b"")


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_closed_stream_is_no_error(closed: str) -> None:
    stream = {"stdout": 1, "stderr": 2}[closed]
    command = [sys.executable, "-m", "dsv4_matrix.cli", "check"]
    shell = ["sh", "-c", f'exec "$@" {stream}>&-', "sh", *command]
    run = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_full_disk_is_said_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "dsv4_matrix.cli", "list"]
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (run.returncode, run.stderr) == (1, "dsv4-matrix: cannot write to stdout: No space left on device\n")


def test_terminal_without_unicode_gets_escapes(fresh: Cli, readme: Path) -> None:
    code = "import sys; from dsv4_matrix.cli import main; sys.exit(main(sys.argv[1:]))"
    ran = fresh(code, "table", "--check", "--readme", str(readme), PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (ran.status, ran.err) == (1, "")
    assert "| \\u2713 " in ran.out
    assert "✓" not in ran.out
