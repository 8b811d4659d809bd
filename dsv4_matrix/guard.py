"""What keeps one case from costing others: a deadline, large pools one at a time, and an end to a broken device.

A CUDA context that saw an illegal access fails everything after it, so the process ends before its next case and the
replacement starts on a clean device. A hang is ended by a watchdog thread in C, which needs neither the interpreter's
lock nor the main thread: a kernel that never returns holds both up.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import os
import re
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dsv4_matrix import waking
from dsv4_matrix.declaration.model import Case
from dsv4_matrix.machine import Machine
from dsv4_matrix.selection import cases_of
from dsv4_matrix.shard.notes import NOTES, Found, note_path, write_found

#: Exit status of a worker that ends because its device is unusable; nothing is lost by it.
SPOILED = 86


class Guard:
    """Registered as a plugin in every process that runs cases.

    Args:
        worker: xdist id of this process, None if it is not a worker. Only a worker can be ended and replaced, so only
            there does the deadline hold.
        timeout: seconds that a case may take, without what it waits for its turn.
        machine: fields of the machine that this process runs cases on, for the controller; asked if there are cases.
        kernels: fields of each ``ServedCall`` of its backend there; asked likewise.
    """

    def __init__(
        self,
        worker: str | None,
        timeout: float,
        machine: Callable[[], Mapping[str, str]] = dict,
        kernels: Callable[[], Sequence[Mapping[str, str]]] = tuple,
    ) -> None:
        self._worker = worker
        self._timeout = timeout
        self._machine = machine
        self._kernels = kernels
        self._note: int | None = None
        self._spoiled = ""
        self._capture: Any = None
        # Taken out of the environment, so that a test that starts pytest itself does not write this worker's notes.
        self._notes = os.environ.pop(NOTES, None) if worker is not None else None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._capture = session.config.pluginmanager.getplugin("capturemanager")
        if self._worker is not None and self._notes:
            path = note_path(Path(self._notes), self._worker)
            self._note = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            faulthandler.enable(self._note)  # the stack of a crash; later than pytest's own, which goes to stderr

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Before xdist tells the controller that this worker has collected, and before the first case."""
        if cases_of(session.items):
            # Half a million objects of torch and its like are here to stay: looking through them takes a full
            # collection a sixth of a second each time, of which a run has several.
            gc.freeze()
        if self._worker is not None and self._notes:
            cases = {nodeid: case_id for case_id, nodeid in cases_of(session.items)}
            found = Found(cases, self._machine(), self._kernels()) if cases else Found(cases)
            write_found(Path(self._notes), self._worker, found)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if self._spoiled and self._worker is not None:
            os._exit(SPOILED)  # an ordinary exit would wait for the broken device
        done = yield
        if self._spoiled and self._worker is None:
            item.session.shouldfail = (
                f"{self._spoiled}; cases after it would fail for its reason: run with -n 1 or -n auto, where the "
                f"process is replaced"
            )
        return done

    @contextmanager
    def watch(self, case: Case, machine: Machine) -> Iterator[None]:
        """Around one case: its turn if its pool is large, then its time, and no end of a run that looks like a pass."""
        alone = self._worker is None
        with _turn(case, machine), self._deadline(), self._no_good_end(case) if alone else nullcontext():
            waking.finish()
            yield

    def device_error(self, case: Case, machine: Machine, reason: str) -> str:
        """What the device says after ``case``; empty if it is fit for the next one.

        Args:
            reason: why the case did not pass. Out of memory leaves no error behind, but memory that nobody gives back.
        """
        if machine.kind != "gpu":
            return ""
        said = device_error()
        if said or re.search("out of memory", reason, re.IGNORECASE):
            self._spoiled = f"case {case.id} left the device unusable"
        return said

    @contextmanager
    def _deadline(self) -> Iterator[None]:
        if self._note is None:
            yield
            return
        faulthandler.dump_traceback_later(self._timeout, exit=True, file=self._note)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    @contextmanager
    def _no_good_end(self, case: Case) -> Iterator[None]:
        """Where nothing outlives this process, ``os._exit(0)`` of a backend would pass for a run without a failure."""
        leave, process = os._exit, os.getpid()

        def leave_badly(status: int) -> NoReturn:
            if os.getpid() == process:  # of a fork it is the usual end
                if self._capture is not None:
                    self._capture.suspend_global_capture()
                told = f"case {case.id} ended this process with status {status}; run with -n 1, where it ends a worker"
                os.write(2, f"dsv4-matrix: {told}\n".encode())
                status = status or 1
            leave(status)

        os._exit = leave_badly
        try:
            yield
        finally:
            os._exit = leave


def device_error() -> str:
    """Waits for the device and returns the error that it then reports, on one line; empty if there is none."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return ""


@contextmanager
def _turn(case: Case, machine: Machine) -> Iterator[None]:
    """Large pools of several workers would not fit together: one at a time on a device, also across runs."""
    if case.variant is None or not case.variant.large_pool:
        yield
        return
    path = Path(tempfile.gettempdir()) / f"dsv4-matrix-{os.getuid()}-{_device_id(machine)}.lock"
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)  # released by the kernel if this process dies
        yield
    finally:
        _give_memory_back(machine)
        os.close(number)


def _device_id(machine: Machine) -> str:
    """The same for every process that uses this device, whatever number it goes by there."""
    if machine.kind != "gpu":
        return "cpu"
    import torch

    return re.sub(r"[^\w-]", "_", str(torch.cuda.get_device_properties(0).uuid))


def _give_memory_back(machine: Machine) -> None:
    """The allocator would keep a large pool, and the next worker's would not fit beside it."""
    if machine.kind == "gpu":
        import torch

        gc.collect()
        torch.cuda.empty_cache()
