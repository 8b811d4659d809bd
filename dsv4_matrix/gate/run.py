"""Runs the matrix twice under two plans and says whether the bits agree."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

from dsv4_matrix.environment import (
    SUITE,
    Attestation,
    ConflictError,
    EnvironmentValueError,
    Launch,
    Profile,
    prepare,
)
from dsv4_matrix.gate import canaries
from dsv4_matrix.gate.compare import Compare, Run, Verdict, compare
from dsv4_matrix.gate.plan import PLAN_A, PLAN_B, RUN_VARIABLE, RunPlan
from dsv4_matrix.gate.rows import RowStore, describe
from dsv4_matrix.report import bits
from dsv4_matrix.report.canonical import ReportError, write_in_one_step

ALIGNED, NOT_ALIGNED, BAD_INPUT = 0, 1, 2
_POLL_SECONDS = 0.02

#: (plan, report path) -> arguments of a Python interpreter that runs the matrix that way
Command = Callable[[RunPlan, Path], Sequence[str]]

#: (run A, verdict, canaries not caught) -> what was recorded, in a sentence; GateError or ReportError if it cannot be
Record = Callable[[Run, Verdict, Sequence[str]], str]


class GateError(Exception):
    """A run that left nothing to compare; the message says which and why."""


def run_gate(
    command: Command,
    *,
    level: bits.Level,
    minimum: int,
    folder: Path,
    profiles: Sequence[Profile] = (SUITE,),
    plans: tuple[RunPlan, RunPlan] = (PLAN_A, PLAN_B),
    environ: Mapping[str, str] | None = None,
    out: TextIO | None = None,
    judge: Callable[..., Verdict] = compare,
    record: Record | None = None,
) -> int:
    """Run twice, compare, and print the verdict.

    Args:
        command: how to run the matrix. The run writes a report with digests, and ``write_attestations`` beside it.
        level: what the plans differ in; cases that promise less are not compared.
        minimum: rows that must be compared at least.
        folder: where reports, raw rows and ``verdict.json`` go; a fresh folder below it for each gate.
        profiles: of both runs; a user's different value of a forced variable refuses the gate.
        environ: the user's, by default ``os.environ``.
        judge: the comparison; replaced only to show that the canaries notice a broken one.
        record: called when the runs were compared, whatever the verdict.

    Returns:
        0 if aligned, 2 if a run found its input to be bad, which is told in a line on stderr, 1 for everything else, a
        verdict that cannot be recorded included. Nothing is run again.
    """
    out = out or sys.stdout
    environ = os.environ if environ is None else environ
    folder.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="gate-", dir=folder))
    try:
        children = [_child(plan, command, place, profiles, environ) for plan in plans]
        _run_side_by_side(children, place, out)
        runs = [read_run(_report_path(place, child.plan), child.run) for child in children]
        if os.path.samefile(*(_report_path(place, plan) for plan in plans)):
            raise GateError("both runs wrote the same file; give each its own report")
    except (GateError, ConflictError, EnvironmentValueError) as error:
        return _conclude(Verdict(aligned=False, refused=str(error)), (), place, out)
    except _RunRefusedError as error:
        shutil.rmtree(place)
        # Two runs on one device are refused alike, and which of them said so first is nobody's concern.
        which = f", run {error.run}" if plans[0].device != plans[1].device else ""
        print(f"dsv4-matrix gate{which}: {error}", file=sys.stderr)
        return BAD_INPUT
    a, b = runs
    kept_a, kept_b = (row_store(_report_path(place, plan)) for plan in plans)
    detail = partial(describe, kept_a, kept_b)
    verdict = judge(a, b, level=level, minimum=minimum, detail=detail)
    alone: Compare = partial(judge, level=level, minimum=1)
    uncaught = (*canaries.uncaught(alone), *canaries.uncaught_in(a, alone, level))
    status = _conclude(verdict, uncaught, place, out)
    if record is None or verdict.refused:
        return status
    try:
        out.write(f"{record(a, verdict, uncaught)}\n")
    except (GateError, ReportError) as error:
        out.write(f"evidence not recorded: {error}\n")
        return NOT_ALIGNED
    return status


def write_attestations(report: Path, attestations: Sequence[Attestation], environ: Mapping[str, str]) -> None:
    """What a run says of itself beside its report: the name that the gate gave it, then one attestation a worker."""
    lines = [environ.get(RUN_VARIABLE, ""), *(attestation.to_json() for attestation in attestations)]
    write_in_one_step(("\n".join(lines) + "\n").encode("ascii"), _attestation_path(report))


def write_refusal(report: Path, told: str) -> None:
    """Why a run with this report ends in ``BAD_INPUT``: a line that the gate tells once, whichever run said it."""
    write_in_one_step(f"{told}\n".encode(), _refusal_path(report))


def read_run(report: Path, expected: str) -> Run:
    """The run that wrote ``report``.

    Raises:
        GateError: unreadable or truncated files, no result at all, or files of another run than ``expected``.
    """
    try:
        read = bits.loads(report.read_bytes(), str(report))
        name, *told = _attestation_path(report).read_text("ascii").splitlines()
        attestations = tuple(Attestation.from_json(line) for line in told)
    except OSError as error:
        raise GateError(f"{error.filename}: {error.strerror}; the run left no report") from None
    except (ReportError, ValueError) as error:
        raise GateError(str(error)) from None
    if not read.report.results:
        raise GateError(f"{report}: no case in it; an empty run proves nothing")
    if name != expected:
        raise GateError(f"{report}: is of run {name!r}, expected {expected!r}; results of another run were reused")
    return Run(name, read, attestations)


class _RunRefusedError(Exception):
    """Bad input that only a run could find; ``run`` is its plan's name, the message what it said."""

    def __init__(self, run: str, told: str) -> None:
        super().__init__(told)
        self.run = run


@dataclass(frozen=True)
class _Child:
    """One run as it is about to start: its plan, the name that it must write back, its command and environment."""

    plan: RunPlan
    run: str
    prepared: Launch


def _child(
    plan: RunPlan, command: Command, place: Path, profiles: Sequence[Profile], environ: Mapping[str, str]
) -> _Child:
    """Nothing is started. GateError, ConflictError or EnvironmentValueError for what the user has set."""
    run = f"{plan.name}-{secrets.token_hex(8)}"
    seeded = [_with_hash_seed(profile, plan) for profile in profiles]
    free = {name: value for name, value in environ.items() if name != "PYTHONHASHSEED"}  # the plan's to choose
    argv = command(plan, _report_path(place, plan))
    prepared = prepare(argv, seeded, {**free, **plan.environ(run)}, strict=True)
    if prepared.applied.not_deterministic:
        raise GateError(f"not deterministic: {'; '.join(prepared.applied.not_deterministic)}")
    return _Child(plan, run, prepared)


def _run_side_by_side(children: Sequence[_Child], place: Path, out: TextIO) -> None:
    """All runs at once: what else a machine does is one more thing that must not matter, and starting takes a while.

    GateError or _RunRefusedError, and the end of the others, as soon as one fails.
    """
    for child in children:
        plan = child.plan
        workers = "1 worker" if plan.workers == 1 else f"{plan.workers} workers"
        out.write(f"run {plan.name}: {workers}, {'descending' if plan.reverse else 'ascending'} order\n")
    out.flush()
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for child in children:
            running[child.plan.name] = subprocess.Popen(child.prepared.argv, env=dict(child.prepared.environ))
        while running:
            for name, status in [(name, process.poll()) for name, process in running.items()]:
                if status is None:
                    continue
                del running[name]
                refusal = _refusal_path(place / f"{name}.jsonl")
                if status == BAD_INPUT and refusal.is_file():
                    raise _RunRefusedError(name, refusal.read_text("utf-8").strip())
                if status != 0:
                    raise GateError(f"run {name} ended with status {status}; make it pass by itself first")
            time.sleep(_POLL_SECONDS)
    finally:
        for process in running.values():
            process.terminate()
            process.wait()


def _with_hash_seed(profile: Profile, plan: RunPlan) -> Profile:
    owned = any(variable.name == "PYTHONHASHSEED" for variable in profile.variables)
    return profile.replacing(PYTHONHASHSEED=plan.hash_seed) if owned else profile


def _conclude(verdict: Verdict, uncaught: Sequence[str], place: Path, out: TextIO) -> int:
    write_in_one_step(f"{verdict.to_json()}\n".encode("ascii"), place / "verdict.json")
    out.write(f"{verdict}\n")
    for canary in uncaught:
        out.write(f"canary not {'tried' if canary == canaries.UNTRIED else 'caught'}: {canary}\n")
    aligned = verdict.aligned and not uncaught
    if aligned:  # raw rows are there to tell a mismatch in bits, and they are large
        for rows in place.glob("*.rows"):
            shutil.rmtree(rows)
    told = "aligned" if aligned else "NOT aligned"
    out.write(f"{told}; reports and verdict in {place}\n")
    return ALIGNED if aligned else NOT_ALIGNED


def _report_path(place: Path, plan: RunPlan) -> Path:
    return place / f"{plan.name}.jsonl"


def _attestation_path(report: Path) -> Path:
    return report.with_suffix(".attestations")


def _refusal_path(report: Path) -> Path:
    return report.with_suffix(".refusal")


def row_store(report: Path) -> RowStore:
    """Where a run with this report keeps its raw rows."""
    return RowStore(report.with_suffix(".rows"))
