"""What a process without torch foresees of the machine, held against what one with torch finds."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dsv4_matrix import machine
from dsv4_matrix.machine import find_machine, foresee_machine

ALONE = """
import sys
from dataclasses import asdict
from dsv4_matrix.machine import foresee_machine, worker_count

print(asdict(foresee_machine()), worker_count() > 0, "torch" in sys.modules)
"""


def test_foreseen_is_what_torch_finds_without_loading_it() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{asdict(find_machine())} True False"


def test_where_torch_is_loaded_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = find_machine()  # loads torch, whichever test came before
    monkeypatch.setattr(machine, "find_machine", lambda: asked)
    assert foresee_machine() is asked


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Put a torch of another build on the path, and a driver beside it."""

    def install(text: str, names: tuple[str, ...] = ()) -> None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
        (tmp_path / "torch" / "version.py").write_text(text)
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setattr("dsv4_matrix.shard.driver.device_names", lambda version: names)

    return install


CUDA = "__version__ = '2.11.0+cu130'\ncuda: str | None = '13.0'\nhip = None\n"


def test_a_gpu_by_the_drivers_name_and_torchs_own_version(build: Any) -> None:
    build(CUDA, ("NVIDIA H200", "NVIDIA H200"))
    found = foresee_machine()
    assert (found.kind, found.torch_device, found.model) == ("gpu", "cuda", "NVIDIA H200")
    assert found.torch == "2.11.0+cu130"
    assert machine.models(1) == ("NVIDIA H200",)


def test_a_driver_without_gpus_leaves_the_interpreter(build: Any) -> None:
    build(CUDA)
    assert (foresee_machine().kind, foresee_machine().torch) == ("cpu", "2.11.0+cu130")


def test_the_interpreter_asked_for_has_its_way(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    build(CUDA, ("NVIDIA H200",))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert foresee_machine().kind == "cpu"


def test_a_build_without_cuda_sees_no_gpu(build: Any) -> None:
    build("__version__ = '2.13.0+cpu'\ncuda = None\n", ("NVIDIA H200",))
    assert foresee_machine().kind == "cpu"


@pytest.mark.parametrize("text", ["__version__ = '2.11.0+rocm7'\nhip = '7.0'\n", "cuda = '13.0'\n"])
def test_a_build_that_says_less_is_left_to_torch(build: Any, text: str) -> None:
    build(text, ("NVIDIA H200",))
    with pytest.raises(SystemExit, match="torch was imported"):
        foresee_machine()


def test_one_worker_a_gpu(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    build(CUDA, ("NVIDIA H200",) * 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("dsv4_matrix.shard.gpus.nvidia_smi", lambda: pytest.fail("its list is not needed to count"))
    assert machine.worker_count() == 3


def test_the_callers_list_is_cut_to_what_cuda_shows(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    build(CUDA, ("NVIDIA H200",) * 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,9")
    assert machine.gpus() == ("4", "6")
    assert machine.worker_count() == 2


def test_torch_runs_with_one_thread() -> None:
    code = "from dsv4_matrix.machine import find_machine; find_machine(); import torch; print(torch.get_num_threads())"
    unlimited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", code], env=unlimited, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
