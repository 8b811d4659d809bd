"""One run of a gate: the needles of all selected cases, in the batches of a plan that comes from the environment.

It leaves a report with digests, and an attestation of each of its workers. ``dsv4-matrix gate`` starts two of these.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4_matrix.context import BadInputError, Context, Options
from dsv4_matrix.gate import RunPlan, sampled
from dsv4_matrix.report.bits import Level

if TYPE_CHECKING:
    from dsv4_matrix.admission import KernelPath
    from dsv4_matrix.composition import Composed
    from dsv4_matrix.declaration.model import Case, Matrix
    from dsv4_matrix.overrides import Forced

GOOD, SHORT, BAD_INPUT = 0, 1, 2
#: More failures than this are left to the verdict, which names each in a line.
_FULL_MESSAGES = 4
#: Kernel paths that an admitted backend declares; a prefill of many rows takes the second.
ATTENTION, PREFILL = "attention", "sparse-prefill"


class WorkerDiedError(RuntimeError):
    """A worker process ended by itself; its case, and those behind it, have no result."""


def main(argv: Sequence[str] | None = None) -> int:
    """One run of a gate. 0 when the report is written, whatever the cases say; 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m dsv4_matrix.gate_child", allow_abbrev=False)
    for name in ("--matrix", "--backend", "--reference", "--cells"):
        parser.add_argument(name)
    parser.add_argument("--report", required=True, type=Path)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--level", type=Level, default=Level.BATCH)
    parser.add_argument("--require-gpu", action="store_true")
    args = parser.parse_args(argv)
    plan = RunPlan.observed(os.environ)
    if plan is None:
        print("dsv4_matrix.gate_child: no plan; 'dsv4-matrix gate' starts this", file=sys.stderr)
        return BAD_INPUT
    options = Options(
        matrix=Path(args.matrix),
        backend=args.backend,
        reference=args.reference,
        cells=args.cells,
        report=args.report,
        require_gpu=args.require_gpu,
        search=Path.cwd(),
        explicit=True,
    )
    try:
        return _run(Context(options), plan, args.every, args.level)
    except (BadInputError, ValueError) as error:
        print(f"dsv4-matrix gate, run {plan.name}: {str(error).replace('--matrix-', '--')}", file=sys.stderr)
        return BAD_INPUT
    except WorkerDiedError as error:
        print(f"dsv4-matrix gate, run {plan.name}: {error}", file=sys.stderr)
        return SHORT


def _run(context: Context, plan: RunPlan, every: int, level: Level) -> int:
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
    for composed, worker, attestation in _executed(context, plan, cases, paths):
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
    """
    from dsv4_matrix.admission import NotAdmittedError, admit, declared

    needed = [ATTENTION]
    if any(case.variant is not None and case.variant.forward == "extend" for case in cases):
        needed.append(PREFILL)
    factory = context.setup.backend.factory
    paths = admit(declared(getattr(factory, "original", factory)), needed, _architecture(context))
    for path in paths:
        if reason := path.unsupported(level):
            raise NotAdmittedError(f"{reason}; --level L1 compares its requests one at a time")
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


def _executed(
    context: Context, plan: RunPlan, cases: Sequence[Case], paths: tuple[KernelPath, ...]
) -> Iterator[tuple[Composed, int, str]]:
    """Each case with its worker and the worker's attestation. All workers take cases in the order of ``cases``.

    This process is one of them: it has torch and a device already, and works while the others start.
    """
    workers = min(plan.workers, len(cases))
    if workers == 1:
        for case in cases:
            yield _one(context, plan, case, paths)
        return
    with ProcessPoolExecutor(workers - 1, get_context("spawn"), _start, (context.options, plan, paths)) as pool:
        futures = [(case, pool.submit(_one_here, case.id)) for case in cases]
        for case, future in futures:
            if future.cancel():  # nobody else has begun it
                yield _one(context, plan, case, paths)
        for at, (_, future) in enumerate(futures):
            if future.cancelled():
                continue
            try:
                yield future.result()
            except BrokenProcessPool:
                left = [case.id for case, other in futures[at:] if not other.cancelled() and other.exception()]
                running = ", ".join(left[:workers])  # cases are begun in order, so it is among the first
                raise WorkerDiedError(f"a worker died, running one of these: {running}") from None


#: Of a worker process: its context, plan and kernel paths.
_worker: tuple[Context, RunPlan, tuple[KernelPath, ...]] | None = None


def _start(options: Options, plan: RunPlan, paths: tuple[KernelPath, ...]) -> None:
    global _worker
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = Context(options), plan, paths
    _ = _worker[0].setup


def _end_with_parent() -> None:
    """A worker of a run that was ended would wait for its next case for ever, on a GPU that others need."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(SHORT)


def _one_here(case_id: str) -> tuple[Composed, int, str]:
    assert _worker is not None
    context, plan, paths = _worker
    return _one(context, plan, next(case for case in context.matrix.cases() if case.id == case_id), paths)


def _one(context: Context, plan: RunPlan, case: Case, paths: tuple[KernelPath, ...]) -> tuple[Composed, int, str]:
    from dsv4_matrix.composition import execute_composed
    from dsv4_matrix.environment import SUITE, attest
    from dsv4_matrix.gate import row_store

    assert context.options.report is not None
    for text in ("All-NaN slice", "invalid value"):  # numpy on a poisoned row, in Triton's interpreter
        warnings.filterwarnings("ignore", f"{text} encountered", RuntimeWarning)
    faulthandler.dump_traceback_later(context.timeout, exit=True)  # a hung kernel never returns to Python
    try:
        composed = execute_composed(case, context.setup, plan, row_store(context.options.report), paths)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return composed, os.getpid(), attest([SUITE]).to_json()


def comparable(matrix: Matrix, device: str, level: Level) -> list[Case]:
    """Cases of ``device`` that have a needle and promise ``level``."""
    return [
        case
        for case in matrix.cases(device)
        if case.cell and case.variant and case.variant.prefix_lens and case.cell.promise.covers(level)
    ]


if __name__ == "__main__":
    sys.exit(main())
