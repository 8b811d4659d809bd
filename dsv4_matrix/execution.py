"""One case from declaration to result: build its tensors, drive the backend, judge what it answered."""

from __future__ import annotations

import fcntl
import os
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from dsv4_matrix.declaration.model import Case, Matrix
from dsv4_matrix.loading import Backend
from dsv4_matrix.machine import Machine
from dsv4_matrix.protocol import Reference
from dsv4_matrix.report.result import Outcome, Result, format_margin, without_machine

_OWN = Path(__file__).parent


@dataclass(frozen=True)
class Setup:
    """What every case of a run shares."""

    matrix: Matrix
    machine: Machine
    backend: Backend
    reference: Reference


@dataclass(frozen=True)
class Execution:
    """A result and what a person reads: one screen, empty for a pass."""

    result: Result
    message: str


def execute(case: Case, setup: Setup) -> Execution:
    """Run ``case``. Whatever the backend raises is an outcome, not an exception of this function."""
    try:
        if case.kind != "case":
            return _probe(case, setup)
        with _alone(case):
            return _case(case, setup)
    except Exception as error:
        said = without_machine(f"{type(error).__name__}: {error}".strip())
        return Execution(_result(case, Outcome.ERROR, said), _screen(case, setup, error))


def _case(case: Case, setup: Setup) -> Execution:
    from dsv4_matrix.cases.build import build_scenario
    from dsv4_matrix.judge import judge
    from dsv4_matrix.modes.drive import drive

    device = setup.machine.torch_device
    scenario = build_scenario(case, setup.matrix, device)
    trace = drive(case, scenario, setup.backend.factory, device)
    verdict = judge(
        case,
        scenario,
        trace.observations,
        setup.reference,
        setup.matrix.tolerances,
        backend_name=setup.backend.name,
        device=setup.machine.model,
    )
    outcome, message = Outcome(verdict.outcome), verdict.message
    if trace.violations:
        outcome = Outcome.FAILED
        told = "\n".join(f"  {violation}" for violation in trace.violations)
        message = f"{_title(case, setup)}\n{told}\n{message or _reproduce(case, setup)}"
    margin = format_margin(verdict.margin)
    return Execution(
        _result(case, outcome, without_machine(message), margin, int(trace.captures), int(trace.replays)), message
    )


def _probe(case: Case, setup: Setup) -> Execution:
    from dsv4_matrix.modes.probes import ProbeFailed, run_probe

    try:
        run_probe(case, setup.matrix, setup.backend.factory, setup.machine.torch_device)
    except ProbeFailed as failed:
        message = f"{_title(case, setup)}\n{failed}\n{_reproduce(case, setup)}"
        return Execution(_result(case, Outcome.FAILED, without_machine(str(failed))), message)
    return Execution(_result(case, Outcome.PASSED), "")


def _result(
    case: Case, outcome: Outcome, reason: str = "", margin: str = "", captures: int = 0, replays: int = 0
) -> Result:
    return Result(case.id, case.cell_id, case.kind, outcome, reason, margin, captures, replays)


@contextmanager
def _alone(case: Case) -> Iterator[None]:
    """Large pools of several workers would not fit together: one at a time on a machine, also across runs."""
    if case.variant is None or not case.variant.large_pool:
        yield
        return
    path = Path(tempfile.gettempdir()) / f"dsv4-matrix-large-pool-{os.getuid()}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released by the kernel if this process dies
        yield


def _title(case: Case, setup: Setup) -> str:
    return f"case {case.id}   backend {setup.backend.name}   device {setup.machine.model}"


def _reproduce(case: Case, setup: Setup) -> str:
    return f"reproduce: dsv4-matrix run --backend {setup.backend.name} --cells {case.id}"


def _screen(case: Case, setup: Setup, error: BaseException) -> str:
    """The error, and the innermost frames outside the harness: where the backend stood."""
    lines = [_title(case, setup), f"raised {type(error).__name__}: {error}", ""]
    lines += _frames(error.__traceback__)
    if error.__cause__ is not None:
        lines.append(f"  caused by {type(error.__cause__).__name__}: {error.__cause__}")
        lines += _frames(error.__cause__.__traceback__)
    return "\n".join([*lines, "", f"seed {case.seed}", _reproduce(case, setup)])


def _frames(trace: TracebackType | None, most: int = 6) -> list[str]:
    frames = traceback.extract_tb(trace)
    outside = [frame for frame in frames if _OWN not in Path(frame.filename).parents] or frames
    return [f"  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in outside[-most:]]
