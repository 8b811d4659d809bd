"""Running the command in this process and in fresh ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from small_matrix import SMALL

from dsv4_matrix.cli import main

REPOSITORY = Path(__file__).parents[2]


class Ran(NamedTuple):
    """What one command did."""

    status: int
    out: str
    err: str


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """``cli("list", "--json")`` in this process, from the repository's root."""
    monkeypatch.chdir(REPOSITORY)

    def run(*argv: str) -> Ran:
        try:
            status = main(argv)
        except SystemExit as stop:
            status = int(stop.code or 0)
        return Ran(status, *capsys.readouterr())

    return run


@pytest.fixture
def fresh() -> Callable[..., Ran]:
    """``fresh(code, *argv)`` in a new interpreter, from the repository's root."""

    def run(code: str, *argv: str, **environment: str) -> Ran:
        done = subprocess.run(
            [sys.executable, "-c", code, *argv],
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            encoding="utf-8",
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def small_matrix(tmp_path: Path) -> Path:
    """A declaration of the tests' own, so that no test of the command depends on what the repository's covers."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    return path


@pytest.fixture
def broken_matrix(tmp_path: Path) -> tuple[Path, list[str]]:
    """The repository's declaration with two mistakes, and what must be said about them."""
    text = (REPOSITORY / "matrix.yaml").read_text(encoding="utf-8")
    path = tmp_path / "matrix.yaml"
    messages = []
    for key, good, bad, message in (
        ("schema: ", "1", "2", "found the number 2; allowed: 1"),
        ("nope: ", "448", "true", "found the boolean true; allowed: a whole number from 64 to 4096"),
    ):
        at = text.index(f"{key}{good}") + len(key)
        line = text.count("\n", 0, at) + 1
        messages.append(f"{path}:{line}:{at - text.rindex(chr(10), 0, at)}: {message}")
        text = text[:at] + bad + text[at + len(good) :]
    path.write_text(text, encoding="utf-8")
    return path, messages
