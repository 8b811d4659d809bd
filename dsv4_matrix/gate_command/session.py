"""``dsv4-matrix gate``: the matrix twice, as two child processes under two plans, and the verdict as evidence.

This process imports no torch; ``child`` is what each of the two runs.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dsv4_matrix.context import BadInputError, Context, Options, as_of_command
from dsv4_matrix.gate import PLAN_A, PLAN_B, GateError, Record, Run, RunPlan, Verdict, run_gate, sampled
from dsv4_matrix.gate_command.child import comparable
from dsv4_matrix.report.bits import Level

BAD_INPUT = 2


def gate(
    *,
    matrix: str | None = None,
    backend: str | None = None,
    reference: str | None = None,
    cells: str | None = None,
    level: str = Level.BATCH.value,
    workers: int = PLAN_B.workers,
    every: int = 1,
    minimum: int | None = None,
    devices: str | None = None,
    folder: str | os.PathLike[str] = "build/gate",
    record: str | os.PathLike[str] | None = None,
    router: str | None = None,
    require_gpu: bool = False,
) -> int:
    """Run twice, compare bit for bit, print the verdict.

    Args:
        matrix, backend, reference, cells, require_gpu: as of ``session.run_matrix``.
        level: what run B differs in: L0 in nothing, L1 in order, processes, hash seed and locale, L2 and L3 in the
            batches around each needle too, L4 also in the device. Cells that promise less are left out.
        workers: processes of run B; run A has half as many, rounded down, and at least one.
        every: one case in so many, chosen by the crc32 of its id.
        minimum: rows to be compared at least, 1 or more; by default two for each case that every device runs.
        devices: ``X,Y``, entries of CUDA_VISIBLE_DEVICES for the two runs; needed for L4.
        folder: where reports, rows and verdict go.
        record: folder for this device's evidence, ``<device>.gate.json``; only of the whole matrix.
        router: ``module:attribute`` that says which worker runs which case (``dsv4_matrix.routing``); by default by
            static cost.

    Returns:
        0 aligned, 1 anything else, 2 for bad input.
    """
    asked = Level(level)
    here = Path.cwd()
    options = Options.of_command(
        matrix=matrix, backend=backend, reference=reference, cells=cells, require_gpu=require_gpu
    )
    context = Context(options)
    try:
        for option, number in (("--every", every), ("--minimum", minimum)):
            if number is not None and number < 1:
                raise BadInputError(f"{option} {number}: give a number from 1 on")
        if record is not None and (cells is not None or every != 1):
            raise BadInputError("--record: evidence is of the whole matrix; leave out --cells and --every")
        plans = _plans(asked, workers, devices)
        least = _least(context, every, asked)
    except (BadInputError, ValueError) as error:
        print(f"dsv4-matrix gate: {as_of_command(str(error))}", file=sys.stderr)
        return BAD_INPUT
    child = ["-m", "dsv4_matrix.gate_command.child", "--matrix", context.matrix.path, "--every", str(every)]
    child += ["--level", asked.value]
    for name, value in (("--backend", backend), ("--reference", reference), ("--cells", cells), ("--router", router)):
        child += [] if value is None else [name, value]
    child += ["--require-gpu"] if require_gpu else []
    # Runs are given the matrix that was found; their messages name what the user did.
    again = context.repeat.also(
        {"--level": asked.value if asked is not Level.BATCH else None, "--devices": devices or None}
    )
    child.append(f"--repeat={shlex.join(again.options)}")
    return run_gate(
        lambda plan, report: [*child, "--report", str(report)],
        level=asked,
        minimum=least if minimum is None else minimum,
        folder=here / folder,
        plans=plans,
        record=None if record is None else recorder(Path(context.matrix.path), asked, here / record),
    )


def recorder(matrix: Path, level: Level, folder: Path) -> Record:
    """Writes a verdict of the sources as they are now into ``folder``; GateError if they change while the gate runs."""
    from dsv4_matrix.machine import slug
    from dsv4_matrix.report import gate_evidence

    began = gate_evidence.gate_fingerprint(matrix)

    def write(run: Run, verdict: Verdict, uncaught: Sequence[str]) -> str:
        if gate_evidence.gate_fingerprint(matrix) != began:
            raise GateError("the sources changed while the gate ran")
        header, attested = run.report.report.header, run.attestations[0]
        told = dict(attested.must_match)
        found = gate_evidence.GateEvidence(
            header=header,
            gate_sources=began,
            environment=attested.sha256(),
            device=told.get("device", ""),
            driver=told.get("driver", ""),
            level=level,
            cases=sum(bits.promise.covers(level) for bits in run.report.bits.values()),
            rows=verdict.compared,
            differ=len(verdict.mismatched),
            missing=len(verdict.missing_in_a) + len(verdict.missing_in_b),
            short=len(verdict.fell_short),
            uncaught=len(uncaught),
        )
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{slug(header.device_model)}{gate_evidence.SUFFIX}"
        gate_evidence.write(found, path)
        return f"evidence recorded in {path}; 'dsv4-matrix table --write' brings it into README.md"

    return write


def _least(context: Context, every: int, level: Level) -> int:
    """Rows to be compared at least: two for each chosen case that every device runs.

    BadInputError if no chosen case can be compared, whatever the device.
    """
    chosen = set(sampled((case.id for case in context.selected), every))
    if not chosen & {case.id for case in comparable(context.matrix, None, level)}:
        sample = f", of which --every {every} leaves {len(chosen)}," if every != 1 else ""
        raise BadInputError(
            f"none of the {len(context.selected)} selected cases{sample} can be compared at {level.value}: a probe, a "
            f"refusal and a case without a request have no rows, and a cell may promise less; 'dsv4-matrix explain "
            f"CELL' shows what a cell promises, 'dsv4-matrix list' its cases"
        )
    return max(1, 2 * len(chosen & {case.id for case in comparable(context.matrix, "cpu", level)}))


def _plans(level: Level, workers: int, devices: str | None) -> tuple[RunPlan, RunPlan]:
    """The two plans; ValueError for devices that do not fit the level."""
    if workers < 1:
        raise ValueError(f"-n {workers}: run B needs at least one process")
    first = replace(PLAN_A, workers=max(1, workers // 2))
    second = {
        Level.SAME_PLAN: replace(first, name="B"),
        Level.SAME_CASES: replace(PLAN_B, workers=workers, composition=PLAN_A.composition, fillers=PLAN_A.fillers),
    }.get(level, replace(PLAN_B, workers=workers))
    named = (devices or "").split(",") if devices else []
    if level is Level.DEVICE and len(set(named)) != 2:
        raise ValueError("--level L4 compares two devices of one model; name them, as in --devices 0,1")
    if level is not Level.DEVICE and named:
        raise ValueError(f"--devices {devices}: only --level L4 compares devices")
    return (replace(first, device=named[0]), replace(second, device=named[1])) if named else (first, second)
