"""One case from declaration to result: build its tensors, drive the backend, judge what it answered."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from dsv4_matrix.declaration.model import Case, Matrix
from dsv4_matrix.import_fault import ENDINGS
from dsv4_matrix.loading import Backend
from dsv4_matrix.machine import Machine
from dsv4_matrix.protocol import Reference
from dsv4_matrix.repeat import DRAW, PLAIN, Repeat
from dsv4_matrix.report.result import Outcome, Result, format_margin, without_machine

_OWN = Path(__file__).parent


@dataclass(frozen=True)
class Setup:
    """What every case of a run shares; ``repeat`` is told, not used: the command that would run a case again."""

    matrix: Matrix
    machine: Machine
    backend: Backend
    reference: Reference
    repeat: Repeat = PLAIN


@dataclass(frozen=True)
class Execution:
    """A result and what a person reads: one screen, empty for a pass. ``spent`` is seconds by phase, for telemetry."""

    result: Result
    message: str
    spent: Mapping[str, float] = field(default_factory=dict)


def execute(case: Case, setup: Setup) -> Execution:
    """Run ``case``. Whatever the backend raises is an outcome, not an exception of this function: a SystemExit too."""
    from dsv4_matrix.modes.errors import BackendError

    try:
        with _quiet_poison():
            return _probe(case, setup) if case.kind != "case" else _case(case, setup)
    except BackendError as error:
        return fault(case, setup, Outcome.ERROR, str(error))
    except ENDINGS as error:
        return raised(case, setup, error)


def raised(case: Case, setup: Setup, error: BaseException) -> Execution:
    """The error of a case that ended in ``error`` somewhere that has no place of its own."""
    frames = "\n".join(_frames(error.__traceback__))
    return fault(case, setup, Outcome.ERROR, f"{type(error).__name__}: {error}\n{frames}")


@contextmanager
def _quiet_poison() -> Iterator[None]:
    """numpy warns where interpreted kernels do on poison what a GPU does in silence: inf - inf, NaN to int.

    Here and not in a configuration, as the fixture runs in suites of others, where warnings may be errors.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
        yield


def draws(case: Case, count: int) -> Iterator[Case]:
    """``case`` itself, then the same case from ``count - 1`` other seeds; a probe draws nothing and runs once."""
    yield case
    if case.kind == "case":
        for number in range(1, count):
            yield replace(case, id=f"{case.id}{DRAW}{number}")


def together(before: Execution, after: Execution) -> Execution:
    """What two draws of a case say about it: the first that did not pass, else the larger margin and all replays."""
    if before.result.outcome is not Outcome.PASSED:
        return before
    results = (before.result, after.result)
    case_id, drawn_id = before.result.id, after.result.id
    joined = replace(
        after.result,
        id=case_id,
        reason=after.result.reason.replace(drawn_id, case_id),
        margin=max((r.margin for r in results), key=lambda margin: float(margin or 0)),
        captures=sum(r.captures for r in results),
        replays=sum(r.replays for r in results),
    )
    phases = {**before.spent, **after.spent}
    spent = {phase: before.spent.get(phase, 0.0) + after.spent.get(phase, 0.0) for phase in phases}
    if joined.outcome is Outcome.PASSED:
        return Execution(joined, "", spent)
    number = int(drawn_id.rpartition(DRAW)[2])
    told = after.message.replace(drawn_id, case_id)
    return Execution(joined, f"{told}\n  draw     {number}, which needs --seeds {number + 1}", spent)


def with_device_error(done: Execution, case: Case, setup: Setup, said: str) -> Execution:
    """``done`` of a case after which the device reported the error ``said``: what it answered proves nothing.

    Of what was found before, the first line is told; the rest would be about answers of a broken device.
    """
    outcome, reason = done.result.outcome, done.result.reason
    if outcome is Outcome.ERROR:
        return done  # the backend ran into that error itself
    headline = _headline(case, setup.backend.name, setup.machine.model, outcome)
    found = reason.partition("\n")[0].removeprefix(f"{headline}, ")  # the judge's reason is its whole screen
    earlier = "" if outcome is Outcome.PASSED else f"\nbefore that: {outcome}, {found}"
    return fault(case, setup, Outcome.ERROR, f"after the case the device reported {said}{earlier}")


def _case(case: Case, setup: Setup) -> Execution:
    from dsv4_matrix.cases.build import build_scenario
    from dsv4_matrix.judge import judge
    from dsv4_matrix.modes.drive import drive

    device = setup.machine.torch_device
    spent: dict[str, float] = {}
    with _timed(spent, "build"):
        scenario = build_scenario(case, setup.matrix, device)
    with _timed(spent, "drive"):
        trace = drive(case, scenario, setup.backend.factory, device)
    with _timed(spent, "judge"):
        verdict = judge(
            case,
            scenario,
            trace.observations,
            setup.reference,
            setup.matrix.tolerances,
            backend_name=setup.backend.name,
            device=setup.machine.model,
            repeat=setup.repeat,
        )
    counts: dict[str, Any] = {
        "margin": format_margin(verdict.margin),
        "captures": int(trace.captures),
        "replays": int(trace.replays),
    }
    if trace.violations:
        told = "\n".join([*trace.violations, verdict.finding])
        return replace(fault(case, setup, Outcome.FAILED, told, **counts), spent=spent)
    result = _result(case, Outcome(verdict.outcome), without_machine(verdict.message), **counts)
    return Execution(result, verdict.message, spent)


@contextmanager
def _timed(spent: dict[str, float], phase: str) -> Iterator[None]:
    """Seconds of the host; on a GPU what was launched may still run, and the next phase that waits pays for it."""
    began = time.perf_counter()
    yield
    spent[phase] = time.perf_counter() - began


def _probe(case: Case, setup: Setup) -> Execution:
    from dsv4_matrix.modes.probes import ProbeFailed, run_probe

    try:
        run_probe(case, setup.matrix, setup.backend.factory, setup.machine.torch_device)
    except ProbeFailed as failed:
        return fault(case, setup, Outcome.FAILED, str(failed))
    return Execution(_result(case, Outcome.PASSED), "")


def _result(
    case: Case, outcome: Outcome, reason: str = "", margin: str = "", captures: int = 0, replays: int = 0
) -> Result:
    return Result(case.id, case.cell_id, case.kind, outcome, reason, margin, captures, replays)


def fault(case: Case, setup: Setup, outcome: Outcome, told: str, **counts: Any) -> Execution:
    """``told`` on one screen, see ``on_screen``."""
    return on_screen(case, setup.backend.name, setup.machine.model, outcome, told, setup.repeat, **counts)


def on_screen(
    case: Case, backend: str, model: str, outcome: Outcome, told: str, repeat: Repeat = PLAIN, **counts: Any
) -> Execution:
    """``told`` in the form of the judge's messages; its first line is the reason in the report.

    Args:
        backend, model: names of what was run, and where; all that a process knows that runs no case itself.
        repeat: the command that would run it again.
    """
    lines = [
        _headline(case, backend, model, outcome),
        *(f"  {line}" for line in told.splitlines()),
        f"  seed     {case.seed}",
        f"  run      {repeat.line(case.id, backend)}",
    ]
    reason = without_machine(told.strip().partition("\n")[0])
    return Execution(_result(case, outcome, reason, **counts), "\n".join(lines))


def _headline(case: Case, backend: str, model: str, outcome: Outcome) -> str:
    return f"{case.id}: {outcome} on {backend} ({model})"


def _frames(trace: TracebackType | None, most: int = 6) -> list[str]:
    frames = traceback.extract_tb(trace)
    outside = [frame for frame in frames if _OWN not in Path(frame.filename).parents] or frames
    return [f"  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in outside[-most:]]
