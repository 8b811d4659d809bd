"""One run of a gate: the needles of all selected cases, in the batches of a plan that comes from the environment.

It leaves a report with digests, and an attestation of each of its workers. ``dsv4-matrix gate`` starts two of these.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4_matrix.admission import KernelPath, NotAdmittedError, admit, declared
from dsv4_matrix.context import BadInputError, Context, Options, as_of_command
from dsv4_matrix.gate import RunPlan, sampled, write_refusal
from dsv4_matrix.gate_command.workers import WorkerDiedError, executed
from dsv4_matrix.report.bits import Level
from dsv4_matrix.routing import Router, RoutingError, load_router

if TYPE_CHECKING:
    from dsv4_matrix.declaration.model import Case, Matrix
    from dsv4_matrix.overrides import Forced

GOOD, SHORT, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
#: More failures than this are left to the verdict, which names each in a line.
_FULL_MESSAGES = 4
#: Kernel paths that an admitted backend declares; a prefill of many rows takes the second.
ATTENTION, PREFILL = "attention", "sparse-prefill"


def main(argv: Sequence[str] | None = None) -> int:
    """One run of a gate.

    Returns:
        0 when the report is written, whatever the cases say; 1 if the backend is not admitted or a worker died; 2 for
        bad input, which is left for the gate to tell; 130 if interrupted.
    """
    parser = argparse.ArgumentParser(prog="python -m dsv4_matrix.gate_command.child", allow_abbrev=False)
    for name in ("--matrix", "--backend", "--reference", "--cells", "--router"):
        parser.add_argument(name)
    parser.add_argument("--report", required=True, type=Path)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--level", type=Level, default=Level.BATCH)
    parser.add_argument("--require-gpu", action="store_true")
    parser.add_argument("--repeat", default="", help="options that a message names, as the user gave them")
    args = parser.parse_args(argv)
    plan = RunPlan.observed(os.environ)
    if plan is None:
        print("dsv4_matrix.gate_command.child: no plan; 'dsv4-matrix gate' starts this", file=sys.stderr)
        return BAD_INPUT
    options = Options.of_command(
        matrix=args.matrix,
        backend=args.backend,
        reference=args.reference,
        cells=args.cells,
        report=args.report,
        require_gpu=args.require_gpu,
    )
    try:
        router = None if args.router is None else load_router(args.router)
        options = replace(options, repeat=tuple(shlex.split(args.repeat)))
        return _run(Context(options), plan, args.every, args.level, router)
    except (BadInputError, RoutingError) as error:
        write_refusal(args.report, as_of_command(str(error)))
        return BAD_INPUT
    except KeyboardInterrupt:  # the worker that it met has named its case
        return INTERRUPTED
    except (NotAdmittedError, WorkerDiedError) as error:
        print(f"dsv4-matrix gate, run {plan.name}: {error}", file=sys.stderr)
        return SHORT


def _run(context: Context, plan: RunPlan, every: int, level: Level, router: Router | None) -> int:
    from dsv4_matrix.gate import write_attestations
    from dsv4_matrix.report.bits import BitsReport, dumps
    from dsv4_matrix.report.canonical import encode, write_in_one_step
    from dsv4_matrix.report.result import Report

    report = context.options.report
    assert report is not None
    header, ledger = context.header(), context.ledger()
    chosen = set(sampled((case.id for case in context.cases), every))
    found = (case for case in comparable(context.matrix, context.machine.kind, Level.SAME_PLAN) if case.id in chosen)
    cases = sorted(found, key=lambda case: case.id, reverse=plan.reverse)
    if not cases:
        raise BadInputError("no selected case has a row to compare")
    paths = admitted(context, cases, level)
    ledger.planned = {case.id for case in cases}
    bits, attested, told = {}, {}, 0
    forced: dict[str, tuple[Forced, ...]] = {}
    for composed, worker, attestation in executed(context, plan, cases, paths, router):
        ledger.record(composed.result)
        attested[worker] = attestation
        if composed.forced:
            forced[composed.result.id] = composed.forced
        if composed.bits is not None:
            bits[composed.result.id] = composed.bits
        elif (told := told + 1) <= _FULL_MESSAGES:
            print(f"run {plan.name}: {composed.message}", file=sys.stderr)
    written = dumps(BitsReport(Report(header, ledger.complete("not compared by the gate")), bits))
    write_in_one_step(written, report)
    if forced:
        lines = [encode({"id": case, **asdict(value)}) for case, values in sorted(forced.items()) for value in values]
        path = report.with_suffix(".forced.jsonl")
        write_in_one_step(("\n".join(lines) + "\n").encode("ascii"), path)
        print(f"run {plan.name}: {len(lines)} values of {len(forced)} cases were replaced by a rule, see {path}")
    from dsv4_matrix.environment import Attestation

    write_attestations(report, [Attestation.from_json(attested[worker]) for worker in sorted(attested)], os.environ)
    return GOOD


def admitted(context: Context, cases: Sequence[Case], level: Level) -> tuple[KernelPath, ...]:
    """The kernel paths of ``cases``, which the backend declares ``level`` for on this device, else NotAdmittedError.

    A path that serves one request at a time is admitted below L2, where each needle is alone in its batch.
    BadInputError for a declaration that cannot be read.
    """
    needed = [ATTENTION]
    if any(case.variant is not None and case.variant.forward == "extend" for case in cases):
        needed.append(PREFILL)
    backend = context.setup.backend
    try:
        told = declared(backend.original)
    except ValueError as error:
        raise BadInputError(f"backend {backend.name}: {error}") from None
    paths = admit(told, needed, _architecture(context))
    for path in paths:
        if reason := path.unsupported(level):
            what = (
                "L1 compares its requests one at a time" if path.serial else f"{path.promise.value} is what it promises"
            )
            raise NotAdmittedError(f"{reason}; --level {what}")
    return paths


def _architecture(context: Context) -> str:
    """``interpreter``, ``sm90``, ``gfx950``: as backends name it in their declaration."""
    if context.machine.kind != "gpu":
        return "interpreter"
    import torch

    if torch.version.hip:
        return str(torch.cuda.get_device_properties(0).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(0)
    return f"sm{major}{minor}"


def comparable(matrix: Matrix, device: str | None, level: Level) -> list[Case]:
    """Cases of ``device``, or of any for None, that have a needle and promise ``level``."""
    return [
        case
        for case in matrix.cases(device)
        if case.cell and case.variant and case.variant.prefix_lens and case.cell.promise.covers(level)
    ]


if __name__ == "__main__":
    sys.exit(main())
