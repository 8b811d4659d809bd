"""``explain --backend`` loads the backend that ``run`` would load, and says what it says of itself on this machine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stub_base

from dsv4_matrix.loading import load_backend
from dsv4_matrix.machine import find_machine
from dsv4_matrix.report.kernels import kernel_paths, reasons_text

Explain = Callable[[str, str], Any]
TELLING = """
from stub_base import Backend as Base

class Silent(Base): ...

class Telling(Base):
    @staticmethod
    def kernel_paths(device):
        return [{"call": "attention", "kernel": "mine", "why": f"made for {device}"}]

class Broken(Base):
    @staticmethod
    def kernel_paths(device):
        return "mine"

class Leaving(Base):
    @staticmethod
    def kernel_paths(device):
        raise SystemExit("bye")
"""


@pytest.fixture
def explain(cli: Callable[..., Any], small_matrix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Explain:
    """``explain(cell, backend)`` in a folder that has a module of backends, beside the small matrix."""
    (tmp_path / "explained.py").write_text(TELLING, encoding="utf-8")
    (tmp_path / "leaving.py").write_text("raise SystemExit('bye')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(stub_base.__file__).parent)])
    monkeypatch.delitem(sys.modules, "explained", raising=False)

    def run(name: str, backend: str) -> Any:
        return cli("explain", name, "--matrix", str(small_matrix), "--backend", backend)

    return run


def here(backend: str) -> str:
    return f"kernels of {backend} on this machine ({find_machine().model}), as it says itself:"


def test_it_shows_what_the_backend_says_of_this_machine(explain: Explain) -> None:
    for name in ("r0/eager", "r0-eager-decode"):
        ran = explain(name, "explained:Telling")
        assert (ran.status, ran.err) == (0, "")
        served = f"  mine serves attention: made for {find_machine().torch_device}"
        assert f"\n{here('explained:Telling')}\n{served}\n" in ran.out
        assert "kernels of triton" not in ran.out, "only of the one that was asked for"


def test_an_installed_backend_shows_its_table_and_what_serves_here(explain: Explain) -> None:
    ran = explain("r0/eager", "triton")
    assert "\nkernels of triton, as it declares them:\n  attention: " in ran.out
    told = reasons_text(kernel_paths(load_backend("triton").original, find_machine().torch_device))
    assert told
    assert "\n".join([here("triton"), *(f"  {line}" for line in told), "", "run it: "]) in ran.out


def test_a_backend_that_does_not_tell_is_said_to(explain: Explain) -> None:
    ran = explain("r0/eager", "explained:Silent")
    assert ran.status == 0
    assert f"{here('explained:Silent')}\n  it does not tell, as a backend with one kernel need not\n" in ran.out


def test_a_refused_cell_has_no_kernels(explain: Explain) -> None:
    ran = explain("r4/verify-cg", "explained:Telling")
    assert ran.status == 0
    assert "kernels of" not in ran.out


@pytest.mark.parametrize("name", ["r0/eager", "r0-eager-decode", "r4/verify-cg"])
def test_the_command_that_runs_it_has_the_backend(explain: Explain, name: str) -> None:
    words = shlex.split(explain(name, "explained:Silent").out.splitlines()[-1])
    assert words[words.index("--backend") + 1] == "explained:Silent"


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        ("nobody", "there is no backend 'nobody'; installed backends: "),
        ("explained:Nothing", "backend 'explained:Nothing': explained has no Nothing"),
        ("not_there:Backend", "backend 'not_there:Backend': module not_there does not import"),
        ("explained:__name__", "backend explained:__name__ is builtins.str object, which cannot be called"),
        ("explained:Broken", "backend explained:Broken: kernel_paths("),
        ("explained:Leaving", "backend explained:Leaving: kernel_paths("),
        ("leaving:Backend", "backend 'leaving:Backend': module leaving does not import: it ended in SystemExit('bye')"),
    ],
)
def test_one_that_cannot_be_used_is_bad_input_as_in_a_run(explain: Explain, backend: str, told: str) -> None:
    ran = explain("r0/eager", backend)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(f"dsv4-matrix explain: {told}")


def test_an_unknown_cell_is_told_before_a_backend_is_loaded(explain: Explain) -> None:
    ran = explain("r0/eagre", "explained:Broken")
    assert ran.status == 2
    assert "no cell or case 'r0/eagre'" in ran.err
    assert "explained" not in sys.modules
