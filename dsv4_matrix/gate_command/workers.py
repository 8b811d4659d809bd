"""Who runs which case of a gate's run: planned by case id alone, so that a run that differs can be run again as it was.

A case may leave something behind in its process. If the first free worker took the next case, what a case found there
would follow the clock; by plan it follows the ids. The first place is the run's own process, which has torch and a
device already and works while the others start.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from multiprocessing import get_context, parent_process
from typing import TYPE_CHECKING

from dsv4_matrix.context import Context, Options
from dsv4_matrix.declaration.drives import DRIVES
from dsv4_matrix.routing import ByCost, Router, route

if TYPE_CHECKING:
    from dsv4_matrix.admission import KernelPath
    from dsv4_matrix.composition import Composed
    from dsv4_matrix.declaration.model import Case
    from dsv4_matrix.gate import RunPlan

#: Exit status of a worker whose run has ended.
_ORPHANED = 1


class WorkerDiedError(RuntimeError):
    """A worker process ended by itself; its case, and those behind it, have no result."""


def executed(
    context: Context,
    plan: RunPlan,
    cases: Sequence[Case],
    paths: tuple[KernelPath, ...],
    router: Router | None = None,
) -> Iterator[tuple[Composed, int, str]]:
    """Each case with its worker and the worker's attestation. Every worker keeps to the order of ``cases``.

    Args:
        paths: kernel paths that serve the cases.
        router: who runs what; by default by static cost.

    Raises:
        RoutingError: by the router's fault.
        WorkerDiedError: naming the case.
    """
    mine, *others = placed(cases, plan.workers, context.machine.kind, router)
    with ExitStack() as stack:
        running = []
        for place in others:
            shared = (context.options, plan, paths)
            pool = ProcessPoolExecutor(1, get_context("spawn"), _start, shared)
            stack.callback(pool.shutdown, cancel_futures=True)  # a run that fails does not wait for its other cases
            running.append([(case, pool.submit(_one_here, case.id)) for case in place])
        for case in mine:
            yield _one(context, plan, case, paths)
        for case, future in (pair for pairs in running for pair in pairs):
            try:
                yield future.result()
            except BrokenProcessPool:
                raise WorkerDiedError(f"a worker died in case {case.id}, or before its first") from None


def placed(cases: Sequence[Case], workers: int, device: str, router: Router | None = None) -> list[list[Case]]:
    """Cases of each place, in the order of ``cases``; never more places than cases, and none without a case."""
    by_cost = ByCost({case.id: weight(case, device) for case in cases})
    places = route([case.id for case in cases], min(workers, len(cases)), router or by_cost)
    at = {case_id: number for number, place in enumerate(places) for case_id in place}
    found = [[case for case in cases if at[case.id] == number] for number in range(len(places))]
    return [place for place in found if place]


def weight(case: Case, device: str) -> int:
    """Steps that a batch of the case takes in all its legs; on a CPU, where attention takes the time, their rows.

    Only weights of one device compare.
    """
    assert case.cell is not None
    assert case.variant is not None
    variant = case.variant
    chain = variant.num_steps > 1
    legs = 3 if chain else 2 if DRIVES[case.cell.mode].graph or variant.forward == "extend" else 1
    steps = legs * max(variant.num_steps - 1, 1)
    return steps * max(variant.extend_lens, default=1) if device == "cpu" else steps


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
    os._exit(_ORPHANED)


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
    except KeyboardInterrupt:
        print(f"dsv4-matrix gate, run {plan.name}: interrupted in case {case.id}", file=sys.stderr)
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()
    return composed, os.getpid(), attest([SUITE]).to_json()
