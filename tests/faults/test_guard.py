"""The guard's parts: whose turn it is, what a device says, and how a death reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4_matrix import guard
from dsv4_matrix.casualty import casualty
from dsv4_matrix.declaration.model import Case, Variant
from dsv4_matrix.machine import Machine
from dsv4_matrix.report.result import Outcome, without_machine

LARGE = Case("r0-eager-large", "case", variant=Variant("large", "decode", (64,), large_pool=True))
SMALL = Case("r0-eager-small", "case", variant=Variant("small", "decode", (64,)))
GPU = Machine("gpu", "cuda", "Test GPU", "2.13.0", "3.7.1")

HOLD = """
import sys
from dsv4_matrix import guard

guard._device_id = lambda machine: sys.argv[1]
guard._give_memory_back = lambda machine: None
exec(sys.argv[2])
with guard._turn(case, None):
    print("mine", flush=True)
    sys.stdin.readline()
"""
CASES = """
from dsv4_matrix.declaration.model import Case, Variant
case = Case("x", "case", variant=Variant("v", "decode", (64,), large_pool={}))
"""


def hold(device: str, large: bool = True) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", HOLD, device, CASES.format(large)]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def has_turn(process: subprocess.Popen[str], seconds: float) -> bool:
    import select

    assert process.stdout is not None
    return bool(select.select([process.stdout], [], [], seconds)[0])


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    started: list[subprocess.Popen[str]] = []

    def start(device: str, large: bool = True) -> subprocess.Popen[str]:
        started.append(hold(device, large))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_large_pools_of_one_device_take_turns(processes: Any) -> None:
    first = processes("GPU-a")
    assert has_turn(first, 30)
    second, other, small = processes("GPU-a"), processes("GPU-b"), processes("GPU-a", large=False)
    assert has_turn(other, 30), "another device has a turn of its own"
    assert has_turn(small, 30), "ordinary cases do not wait"
    assert not has_turn(second, 0.5)
    first.stdin.write("\n")
    first.stdin.flush()
    assert has_turn(second, 30)


def test_a_killed_process_gives_its_turn_back(processes: Any) -> None:
    first = processes("GPU-a")
    assert has_turn(first, 30)
    second = processes("GPU-a")
    assert not has_turn(second, 0.5)
    first.kill()
    assert has_turn(second, 30)


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(guard.os, "getuid", lambda: 7)
    (tmp_path / "target").write_text("")
    (tmp_path / "dsv4-matrix-7-cpu.lock").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic link"), guard._turn(LARGE, Machine("cpu", "cpu", "x", "", "")):
        pass


def test_the_device_is_asked_after_a_pass_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "device_error", lambda: "AcceleratorError: CUDA error: unspecified launch failure")
    watched = guard.Guard("gw0", 60)
    assert "unspecified launch failure" in watched.device_error(SMALL, GPU, "")
    assert watched._spoiled


@pytest.mark.parametrize(
    ("reason", "spoiled"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("RuntimeError: Triton Error [CUDA]: out of memory", True),
        ("ValueError: heads must be one of 16, 32, 64, 128", False),
        ("", False),
    ],
)
def test_only_a_spoiled_device_ends_the_worker(monkeypatch: pytest.MonkeyPatch, reason: str, spoiled: bool) -> None:
    monkeypatch.setattr(guard, "device_error", lambda: "")
    watched = guard.Guard("gw0", 60)
    assert watched.device_error(SMALL, GPU, reason) == ""
    assert bool(watched._spoiled) is spoiled


def test_a_cpu_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "device_error", lambda: pytest.fail("asked"))
    assert guard.Guard(None, 60).device_error(SMALL, Machine("cpu", "cpu", "x", "", ""), "out of memory") == ""


def test_memory_of_the_moment_stays_out_of_a_reason() -> None:
    told = (
        "backend raised in forward: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a "
        "total capacity of 139.81 GiB of which 1.2 GiB is free. Process 4711 has 138.5 GiB memory in use."
    )
    assert without_machine(told) == (
        "backend raised in forward: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB"
    )


def dead(status: int | None) -> Any:
    def wait(seconds: float) -> int:
        if status is None:
            raise subprocess.TimeoutExpired("worker", seconds)
        return status

    io = SimpleNamespace(popen=SimpleNamespace(wait=wait))
    return SimpleNamespace(gateway=SimpleNamespace(id="gw4", _io=io))


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (3, "its worker ended with exit status 3 while the case ran"),
        (-9, "its worker was killed by SIGKILL while the case ran"),
        (-99, "its worker was killed by signal 99 while the case ran"),
        (None, "its worker stopped answering while the case ran"),
    ],
)
def test_how_a_death_reads(tmp_path: Path, status: int | None, reason: str) -> None:
    died = casualty(dead(status), tmp_path, 600)
    assert (died.outcome, died.reason, died.stack) == (Outcome.LOST, reason, "")


def test_a_worker_of_another_machine_just_died(tmp_path: Path) -> None:
    node = SimpleNamespace(gateway=SimpleNamespace(id="gw4"))
    assert casualty(node, tmp_path, 600).reason == "its worker died while the case ran"


def test_the_note_tells_a_timeout_from_a_crash(tmp_path: Path) -> None:
    note = tmp_path / "gw4.txt"
    note.write_text("Timeout (0:10:00)!\nThread 0x1 (most recent call first):\n")
    assert casualty(dead(1), tmp_path, 600).reason == "no result within 600 s; its worker was ended and replaced"
    note.write_text("Fatal Python error: Segmentation fault\n\nCurrent thread 0x1\n")
    died = casualty(dead(-11), tmp_path, 600)
    assert (died.outcome, died.reason) == (Outcome.LOST, "its worker was killed by SIGSEGV while the case ran")
    assert "Segmentation fault" in died.stack


def test_of_a_stack_only_the_case_is_shown(tmp_path: Path) -> None:
    (tmp_path / "gw4.txt").write_text(
        "Timeout (0:10:00)!\n"
        "Thread 0x1 (most recent call first):\n"
        '  File "…/execnet/gateway_base.py", line 1 in receive\n'
        "\n"
        "Thread 0x2 (most recent call first):\n"
        '  File "…/mypkg/kernels.py", line 7 in wait\n'
        '  File "…/dsv4_matrix/execution.py", line 54 in execute\n'
        '  File "…/dsv4_matrix/plugin.py", line 70 in execute\n'
        '  File "…/_pytest/python.py", line 1 in runtest\n'
    )
    assert casualty(dead(1), tmp_path, 600).stack == (
        "Timeout (0:10:00)!\n"
        "Thread 0x2 (most recent call first):\n"
        '  File "…/mypkg/kernels.py", line 7 in wait\n'
        '  File "…/dsv4_matrix/execution.py", line 54 in execute'
    )
