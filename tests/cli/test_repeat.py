"""The command under a failure: it names what decided the case and nothing else, and does what the first run did."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from small_matrix import SMALL

from dsv4_matrix.repeat import PLAIN, Repeat, as_words, path_seen_from

META = Path(__file__).parents[1] / "meta"
CASE = "r0-eager-own-decode"
OWN = SMALL.replace("name: decode", "name: own-decode").replace("name: extend", "name: own-extend")
#: A backend that is wrong, one that is wrong from its third answer on, one that ends its process, and a judge that is.
CODE = """
import os

import dsv4_reference
from toy_backend import ToyBackend


class Wrong(ToyBackend):
    def forward(self, *arguments):
        out, lse = super().forward(*arguments)
        return out + 1, lse


class WrongLater(ToyBackend):
    answers = 0

    def forward(self, *arguments):
        out, lse = super().forward(*arguments)
        WrongLater.answers += 1
        return out + (WrongLater.answers > 2), lse


class Dies(ToyBackend):
    def forward(self, *arguments):
        os._exit(3)


class Shifted:
    visible = staticmethod(dsv4_reference.visible)
    quantise_dequantise = staticmethod(dsv4_reference.quantise_dequantise)
    attend_low_precision = staticmethod(dsv4_reference.attend_low_precision)

    @staticmethod
    def attend(*arguments):
        out, lse = dsv4_reference.attend(*arguments)
        return out + 1, lse


shifted = Shifted()
"""


def test_defaults_leave_the_case_and_its_backend() -> None:
    assert PLAIN.line("r0-eager-a", "mine:Backend") == "dsv4-matrix run --cells r0-eager-a --backend mine:Backend"
    assert as_words({"--matrix": None, "--reference": None}) == ()


def test_every_word_survives_the_shell() -> None:
    repeat = Repeat(("--matrix", "my $HOME/it's.yaml"), "gate").also({"--level": "L1", "--devices": None})
    line = repeat.line("r0-eager-a", "mine:Backend")
    assert shlex.split(line)[1:] == [
        *("gate", "--cells", "r0-eager-a", "--backend", "mine:Backend"),
        *("--matrix", "my $HOME/it's.yaml", "--level", "L1"),
    ]


def test_a_draw_is_reached_by_as_many_seeds() -> None:
    assert PLAIN.line("r0-eager-a#3", "b") == "dsv4-matrix run --cells r0-eager-a --backend b --seeds 4"


@pytest.mark.parametrize(
    ("here", "folder", "path", "named"),
    [
        ("/a/b", "/a/b", "./m.yaml", "./m.yaml"),
        ("/a/b", "/a", "m.yaml", "../m.yaml"),
        ("/a", "/a/b", "../m.yaml", "m.yaml"),
        ("/a/b", "/a", "/c/m.yaml", "/c/m.yaml"),
    ],
)
def test_a_path_is_named_as_it_was_written_if_it_can(here: str, folder: str, path: str, named: str) -> None:
    assert path_seen_from(Path(here), Path(folder), path) == named


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Somebody's folder: a matrix of their own here and another in a folder with a blank, code, and the command."""
    folder = tmp_path / "project"
    (folder / "my own").mkdir(parents=True)
    (folder / "matrix.yaml").write_text(SMALL.replace("name: decode", "name: here"))
    (folder / "my own/matrix.yaml").write_text(OWN)
    (folder / "mine.py").write_text(CODE)
    command = tmp_path / "bin/dsv4-matrix"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m dsv4_matrix.cli "$@"\n')
    command.chmod(0o755)
    return folder


def shell(folder: Path, line: str) -> tuple[int, str]:
    """Exit status and output of a command line in ``folder``."""
    path = os.pathsep.join([str(folder.parent / "bin"), os.environ.get("PATH", "")])
    code = os.pathsep.join([str(META), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": code, "TRITON_INTERPRET": "1"}
    done = subprocess.run(line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stderr == ""
    return done.returncode, done.stdout


def screen(output: str, case_id: str) -> str:
    """The message of a case in the output of a run."""
    return next(block for block in output.split("\n\n") if block.startswith(f"{case_id}: ")).rstrip()


OWN_MATRIX = "--matrix 'my own/matrix.yaml'"


@pytest.mark.parametrize(
    ("case_id", "given", "told"),
    [
        ("r0-eager-here", "--cells 'r0-eager-*' --backend mine:Wrong", "--backend mine:Wrong"),
        (CASE, f"{OWN_MATRIX} --cells 'r0-eager-*' --backend mine:Wrong", f"--backend mine:Wrong {OWN_MATRIX}"),
        (
            CASE,
            f"--backend toy_backend:ToyBackend --reference mine:shifted {OWN_MATRIX} --cells 'r0-eager-*'",
            f"--backend toy_backend:ToyBackend {OWN_MATRIX} --reference mine:shifted",
        ),
        (
            CASE,
            f"-n 2 {OWN_MATRIX} --cells 'r0-eager-*' --backend mine:Wrong --timeout 200 --shard 1/1 --report out.jsonl "
            "--seeds 2",
            f"--backend mine:Wrong {OWN_MATRIX}",
        ),
        (
            CASE,
            f"{OWN_MATRIX} --cells {CASE} --backend mine:WrongLater --seeds 9",
            f"--backend mine:WrongLater {OWN_MATRIX} --seeds 3",
        ),
        (
            CASE,
            f"-n 2 {OWN_MATRIX} --cells 'r0-eager-*' --backend mine:Dies",
            f"--backend mine:Dies {OWN_MATRIX} -n 1",
        ),
    ],
    ids=["defaults", "matrix", "reference", "options that decide nothing", "a later draw", "a death"],
)
def test_the_line_fails_as_the_run_did(folder: Path, case_id: str, given: str, told: str) -> None:
    status, output = shell(folder, f"dsv4-matrix run {given}")
    assert status == 1, output
    failed = screen(output, case_id)
    line = next(text for text in failed.splitlines() if text.startswith("  run ")).split(maxsplit=1)[1]
    assert line == f"dsv4-matrix run --cells {case_id} {told}"

    status, again = shell(folder, line)
    assert status == 1, again
    assert again.startswith("1 case, ")
    assert "\n0 of 1 selected cases passed" in again
    assert screen(again, case_id) == failed


def test_without_what_it_names_the_line_would_run_another_matrix(folder: Path) -> None:
    """What the line was before: the case is not in the matrix that is found here."""
    line = f"dsv4-matrix run --cells {CASE} --backend mine:Wrong"
    with pytest.raises(AssertionError, match=f"no case id matches '{CASE}'"):
        shell(folder, line)


def test_a_report_does_not_depend_on_workers_and_passes_tell_nothing(folder: Path) -> None:
    reports = []
    for workers in "02":
        for backend in ("mine:Wrong", "toy_backend:ToyBackend"):
            given = f"{OWN_MATRIX} --backend {backend} --cells 'r0-eager-*' -n {workers} --report out.jsonl"
            shell(folder, f"dsv4-matrix run {given}")
            reports.append((folder / "out.jsonl").read_bytes())
    assert reports[:2] == reports[2:]
    assert b"--matrix 'my own/matrix.yaml'" in reports[0]
    assert b"dsv4-matrix run" not in reports[1]
