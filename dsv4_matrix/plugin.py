"""pytest plugin: generates one test a case for every test function that asks for ``matrix_case``.

It is loaded in every pytest run of an environment, so it imports neither torch, triton nor a YAML parser: those come
with the first use of the fixture. Results travel from xdist workers as user properties; see ``controller``.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dsv4_matrix import waking
from dsv4_matrix.context import BadInputError, Context, Options
from dsv4_matrix.controller import Controller
from dsv4_matrix.guard import Guard
from dsv4_matrix.repeat import as_words, path_seen_from
from dsv4_matrix.selection import FIXTURE
from dsv4_matrix.shard.notes import NOTES, write_refusal

if TYPE_CHECKING:
    from dsv4_matrix.declaration.model import Case
    from dsv4_matrix.execution import Execution, Setup

CONTEXT = pytest.StashKey[Context]()
CONTROLLER = pytest.StashKey[Controller]()
GUARD = pytest.StashKey[Guard]()

_OPTIONS = (
    ("matrix", "matrix_file", "PATH", "declaration to use (default: matrix.yaml here, else the packaged one)"),
    (
        "matrix-backend",
        "matrix_backend",
        "NAME|module:attr",
        "backend under test, installed or by import path",
    ),
    ("matrix-reference", "matrix_reference", "NAME|module:attr", "reference to judge by (default: the one installed)"),
    ("matrix-cells", "matrix_cells", "EXPR", "fnmatch patterns on case ids, comma means or: 'r4-cg-*,r0-eager-*'"),
    ("matrix-report", "matrix_report", "PATH", "write the canonical report there, and telemetry beside it"),
    ("matrix-shard", "matrix_shard", "I/N", "run the I-th of N parts, whole cells, planned by their declared cost"),
    ("matrix-seeds", "matrix_seeds", "N", "draw each case from N seeds; its margin is the worst of them (default: 1)"),
    ("matrix-timeout", "matrix_timeout", "SECONDS", "end a worker whose case takes longer (default: 600)"),
)


class CaseFailedError(Exception):
    """A case that did not pass. The message is one screen and needs no traceback."""


class MatrixCase:
    """Value of the fixture ``matrix_case``: one case, and how to run it.

    Attributes:
        id: case id, such as ``r4-cg-decode-multi-request``.
        case: its declaration.
        setup: matrix, machine, backend and reference of this run.
    """

    def __init__(
        self, case: Case, setup: Setup, guard: Guard, seeds: int, properties: list[tuple[str, object]]
    ) -> None:
        self.id = case.id
        self.case = case
        self.setup = setup
        self._guard = guard
        self._seeds = seeds
        self._properties = properties

    def __repr__(self) -> str:
        return f"<matrix_case {self.id}>"

    def execute(self) -> Execution:
        """Run the case and record its result; only this makes a case count as run. CaseFailedError unless it passes."""
        __tracebackhide__ = True
        from dsv4_matrix import execution
        from dsv4_matrix.report.result import Outcome
        from dsv4_matrix.report.transport import MESSAGE, spent_property, to_properties

        setup, guard = self.setup, self._guard
        done: Execution | None = None
        for case in execution.draws(self.case, self._seeds):
            with guard.watch(case, setup.machine):
                drawn = execution.execute(case, setup)
                if said := guard.device_error(case, setup.machine, drawn.result.reason):
                    drawn = execution.with_device_error(drawn, case, setup, said)
            done = drawn if done is None else execution.together(done, drawn)
            if done.result.outcome is not Outcome.PASSED:
                break
        assert done is not None
        self._properties.extend([*to_properties(done.result), spent_property(done.spent)])
        if done.result.outcome is not Outcome.PASSED:
            self._properties.append((MESSAGE, done.message))
            raise CaseFailedError(done.message)
        return done


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dsv4-matrix", "DeepSeek-V4 attention matrix")
    for name, ini, metavar, text in _OPTIONS:
        group.addoption(f"--{name}", dest=ini, metavar=metavar, default=None, help=text)
        parser.addini(ini, f"{text} (--{name})", default=None)
    # Not for users: what ``dsv4-matrix run`` was given, where this process is given what that came to.
    group.addoption("--matrix-repeat", dest="matrix_repeat", default=None, help=argparse.SUPPRESS)
    text = "fail at once, with the reason, where there is no usable GPU"
    group.addoption("--matrix-require-gpu", dest="matrix_require_gpu", action="store_true", default=False, help=text)
    parser.addini("matrix_require_gpu", f"{text} (--matrix-require-gpu)", type="bool", default=False)


def pytest_configure(config: pytest.Config) -> None:
    options = _options(config)
    worker: str | None = getattr(config, "workerinput", {}).get("workerid")
    distributed = worker is None and _distributes(config)
    context = config.stash[CONTEXT] = Context(options, elsewhere=distributed)
    if worker is None:
        controller = config.stash[CONTROLLER] = Controller(config, context)
        config.pluginmanager.register(controller, "dsv4_matrix_controller")
    try:
        if options.explicit:
            _validate(context)
        guard = config.stash[GUARD] = Guard(
            worker,
            context.timeout,
            machine=lambda: asdict(context.machine),
            kernels=lambda: [asdict(path) for path in context.kernels],
        )
    except BadInputError as error:
        if worker is not None and (notes := os.environ.get(NOTES)):
            write_refusal(Path(notes), worker, str(error))
        raise pytest.UsageError(str(error)) from error
    config.pluginmanager.register(guard, "dsv4_matrix_guard")
    if options.named and distributed:
        from dsv4_matrix.distribution import Distribution

        config.pluginmanager.register(Distribution(config, context), "dsv4_matrix_distribution")


def _distributes(config: pytest.Config) -> bool:
    """Whether xdist hands out this run's tests, by its own rule: to collect only, this process needs no help."""
    if config.getoption("collectonly", False):
        return False
    return config.getoption("dist", "no") != "no" and bool(config.getoption("tx", ()))


def _options(config: pytest.Config) -> Options:
    def given(name: str) -> str | None:
        return config.getoption(name) or config.getini(name) or None

    here, root = config.invocation_params.dir, config.rootpath

    def path(name: str) -> Path | None:
        if value := config.getoption(name):
            return here / str(value)
        return root / str(config.getini(name)) if config.getini(name) else None

    def repeat() -> tuple[str, ...]:
        if (told := config.getoption("matrix_repeat")) is not None:
            return tuple(shlex.split(told))
        matrix: str | None = config.getoption("matrix_file") or None
        if matrix is None and config.getini("matrix_file"):
            matrix = path_seen_from(here, root, str(config.getini("matrix_file")))
        return as_words({"--matrix": matrix, "--reference": given("matrix_reference")})

    require_gpu = bool(config.getoption("matrix_require_gpu") or config.getini("matrix_require_gpu"))
    names = [ini for _, ini, _, _ in _OPTIONS]
    explicit = require_gpu or any(config.getoption(name) is not None for name in names)
    return Options(
        matrix=path("matrix_file"),
        backend=given("matrix_backend"),
        reference=given("matrix_reference"),
        cells=given("matrix_cells"),
        report=path("matrix_report"),
        shard=given("matrix_shard"),
        timeout=given("matrix_timeout"),
        seeds=given("matrix_seeds"),
        repeat=repeat(),
        require_gpu=require_gpu,
        search=here,
        explicit=explicit,
        named=explicit or any(config.getini(name) for name in names),
    )


def _validate(context: Context) -> None:
    """Everything that can be wrong with the input, before anything runs; what needs torch is left to workers."""
    if context.options.report is not None:
        from dsv4_matrix.report.canonical import ReportError, check_writable

        try:
            check_writable(context.options.report)
        except ReportError as error:
            raise BadInputError(f"--matrix-report: {error}") from None
    _ = context.cases, context.backend_name, context.seeds
    if not context.elsewhere:
        waking.begin(context.machine.torch_device)
        _ = context.setup, context.kernels


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if FIXTURE not in metafunc.fixturenames:
        return
    context = metafunc.config.stash[CONTEXT]
    try:
        cases = context.cases
        _ = context.setup
    except BadInputError as error:
        raise pytest.Collector.CollectError(f"dsv4-matrix: {error}") from error
    metafunc.parametrize(FIXTURE, cases, ids=[case.id for case in cases], indirect=True)


@pytest.fixture
def matrix_case(request: pytest.FixtureRequest) -> MatrixCase:
    """One case of matrix.yaml, for the backend under test. Run it with ``matrix_case.execute()``."""
    context, guard = request.config.stash[CONTEXT], request.config.stash[GUARD]
    return MatrixCase(request.param, context.setup, guard, context.seeds, request.node.user_properties)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, CaseFailedError):
        report.longrepr = str(call.excinfo.value)
    return report


def pytest_report_header(config: pytest.Config) -> list[str] | None:
    context = config.stash[CONTEXT]
    if not context.options.explicit:
        return None
    from collections import Counter

    from dsv4_matrix.report.kernels import reasons_text

    matrix, machine = context.matrix, context.machine
    states = Counter(cell.state.value for cell in matrix.cells)
    return [
        f"dsv4-matrix: {matrix.path} (sha256 {matrix.sha256[:12]}), {len(context.cases)} cases here, "
        f"of {len(matrix.cases())} declared",
        f"dsv4-matrix: {', '.join(f'{count} {state}' for state, count in sorted(states.items()))}",
        f"dsv4-matrix: backend {context.backend_name} on {machine.model}, torch {machine.torch}, "
        f"triton {machine.triton or 'not installed'}",
        *(f"dsv4-matrix: {line}" for line in reasons_text(context.kernels)),
    ]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """One worker a GPU, else one a CPU; None (xdist's own rule) in runs that are not about the matrix."""
    if not _options(config).named:
        return None
    from dsv4_matrix.machine import worker_count

    return worker_count()
