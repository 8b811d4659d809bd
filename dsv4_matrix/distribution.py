"""The controller's part in a run of several workers: GPUs, the plan, and what becomes of a case whose worker died."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dsv4_matrix.casualty import casualty
from dsv4_matrix.context import BadInputError, Context
from dsv4_matrix.controller import cases_of_worker
from dsv4_matrix.repeat import Repeat
from dsv4_matrix.report.kernels import ServedCall
from dsv4_matrix.report.result import Outcome
from dsv4_matrix.shard.gpus import GpuListError, pin
from dsv4_matrix.shard.notes import read_found, read_refusal
from dsv4_matrix.shard.plan import divide_tests
from dsv4_matrix.shard.workers import prepare


class Distribution:
    """Registered as a plugin of the controlling process where xdist distributes tests."""

    def __init__(self, config: pytest.Config, context: Context) -> None:
        self._context = context
        self._cases: Mapping[str, str] = {}  # case id of each node id
        if config.option.maxworkerrestart is None:
            # xdist gives up after a few. Here each death ends a case, and a place whose workers end none is given up.
            config.option.maxworkerrestart = str(10**6)
        self._notes = Path(tempfile.mkdtemp(prefix="dsv4-matrix-"))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, specs: Sequence[Any]) -> None:
        try:
            prepare(specs, self._gpus(len(specs)), os.environ, self._notes)
        except (GpuListError, BadInputError) as error:
            raise pytest.UsageError(str(error)) from None

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        """A worker that found the input to be bad ends the run: a replacement would find the same."""
        if error is not None and (refusal := read_refusal(node)):
            raise pytest.UsageError(refusal)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        self._check_machine(node)
        self._cases = cases_of_worker(node, ids, [case.id for case in self._context.matrix.cases()])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        if config.getoption("dist") != "load":
            return None  # the user asked for another of xdist's own
        from dsv4_matrix.shard.scheduler import PinnedScheduling

        scheduler = PinnedScheduling(config, log, self._plan)
        config.pluginmanager.register(scheduler, "dsv4_matrix_scheduler")
        return scheduler

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """Fill in the report that xdist makes of a test whose worker died; the controller records it."""
        from dsv4_matrix.execution import on_screen
        from dsv4_matrix.report.transport import MESSAGE, to_properties

        if (case_id := self._cases.get(crashitem)) is None:
            return
        case = next(case for case in self._context.cases if case.id == case_id)
        died = casualty(report.node, self._notes, self._context.timeout)
        told = f"{died.reason}\n{died.stack}".rstrip()
        context, repeat = self._context, self._repeat(died.outcome)
        done = on_screen(case, context.backend_name, context.machine.model, died.outcome, told, repeat)
        report.longrepr = done.message
        report.user_properties = [*to_properties(done.result), (MESSAGE, done.message)]

    def _repeat(self, outcome: Outcome) -> Repeat:
        """Which draw a dead worker was at is not known, so all are named; and only its limit makes it a timeout.

        A limit brings a worker along; without one, a single case would run in the process of the command and end it.
        """
        options = self._context.options
        seeds = options.seeds if self._context.seeds > 1 else None
        timeout = options.timeout if outcome is Outcome.TIMEOUT else None
        workers = None if outcome is Outcome.TIMEOUT else "1"
        return self._context.repeat.also({"--seeds": seeds, "--timeout": timeout, "-n": workers})

    def pytest_unconfigure(self) -> None:
        shutil.rmtree(self._notes, ignore_errors=True)

    def _check_machine(self, node: Any) -> None:
        """The header of the report is this process's word about the workers' machine: they have to confirm it."""
        found, foreseen = read_found(node), asdict(self._context.machine)
        if found is None or not found.machine:
            return
        if found.machine == foreseen:
            try:
                self._context.learn_kernels(tuple(ServedCall(**path) for path in found.kernels))
            except BadInputError as error:
                raise pytest.UsageError(str(error)) from None
            return
        unlike = [
            f"{name} {found.machine.get(name)!r}, not {value!r}"
            for name, value in foreseen.items()
            if found.machine.get(name) != value
        ]
        raise pytest.UsageError(
            f"worker {node.gateway.id} runs on another machine than was foreseen: {'; '.join(unlike)}. A report is "
            f"of one machine. If torch sees no GPU there, see nvidia-smi, CUDA_VISIBLE_DEVICES and the driver's "
            f"version; TRITON_INTERPRET=1 asks for the interpreter; -n 0 runs in one process"
        )

    def _gpus(self, workers: int) -> tuple[str, ...]:
        """The GPU of each worker; empty on a CPU. More workers than GPUs were asked for: ``auto`` gives no more."""
        from dsv4_matrix.machine import gpus, models

        if self._context.machine.kind != "gpu":
            return ()
        if len(names := set(models(workers))) > 1:
            raise BadInputError(
                f"these GPUs are of several models ({', '.join(sorted(names))}), and a report is of one; choose with "
                f"CUDA_VISIBLE_DEVICES"
            )
        return pin(workers, gpus(), share=True)

    def _plan(self, nodeids: Sequence[str], workers: int) -> Sequence[Sequence[int]]:
        cases = {case.id: case for case in self._context.cases}
        of_test = {nodeid: cases[case_id] for nodeid, case_id in self._cases.items()}
        return divide_tests(nodeids, of_test, self._context.machine.kind, workers)
