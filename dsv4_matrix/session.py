"""The whole matrix in one call: pytest over the packaged tests, apart from the user's configuration, then a table."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import pytest

from dsv4_matrix import waking
from dsv4_matrix.conclusion import record as record_evidence
from dsv4_matrix.conclusion import tell
from dsv4_matrix.context import BadInputError, Context, Options, as_of_command
from dsv4_matrix.progress import Progress
from dsv4_matrix.report import canonical
from dsv4_matrix.report.kernels import ServedCall, header_text, reasons_text
from dsv4_matrix.report.result import Report, Result
from dsv4_matrix.shard.notes import read_refusal

GOOD, SHORT, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

_SUITE = Path(__file__).parent / "suite"


def run_matrix(
    *,
    matrix: str | os.PathLike[str] | None = None,
    backend: str | None = None,
    reference: str | None = None,
    cells: str | None = None,
    workers: str | None = None,
    report: str | os.PathLike[str] | None = None,
    record: str | os.PathLike[str] | None = None,
    shard: str | None = None,
    timeout: str | None = None,
    seeds: str | None = None,
    require_gpu: bool = False,
    out: TextIO | None = None,
) -> int:
    """Run the selected cases on this machine, print failures and the matrix, and return the exit status.

    Args:
        matrix: the declaration; by default ``matrix.yaml`` here or above, else the packaged one.
        backend, reference: name of an entry point, or ``module:attr``; by default the only one installed.
        cells: fnmatch patterns on case ids, comma means or.
        workers: processes, ``auto`` (one a visible GPU, else one a CPU) or a number; 0 runs in this one, where a hang
            or a crash ends the run. By default ``auto``, and 0 on a machine with one GPU: a worker there runs nothing
            beside another, and costs a second start of Python, torch and CUDA.
        report: file for the canonical report, telemetry beside it.
        record: folder for this device's evidence, ``<device>.jsonl``; only a complete run is recorded.
        shard: ``I/N`` runs the I-th of N parts of the cells.
        seeds: draw each case from so many seeds; a report then holds the worst margins.
        timeout: seconds that a case may take before its worker is ended and replaced.
        require_gpu: refuse to run through the interpreter.
        out: where to print; by default stdout.

    Returns:
        0 if all selected cases passed, 1 if anything fell short or could not be recorded, 2 for bad input, 130 if
        interrupted.
    """
    stream = out or sys.stdout
    options = Options.of_command(
        matrix=matrix,
        backend=backend,
        reference=reference,
        cells=cells,
        report=report,
        shard=shard,
        timeout=timeout,
        seeds=seeds,
        require_gpu=require_gpu,
    )
    context = Context(options, elsewhere=True)
    try:
        count = _workers(workers, context)
        if not count:
            context = Context(options)
            waking.begin(context.machine.torch_device)
            _ = context.setup
        evidence = _evidence_path(context, record)
        if options.report is not None:
            canonical.check_writable(options.report)
        before = context.header()
    except (BadInputError, canonical.ReportError) as error:
        return _refused(str(error))
    machine = context.machine
    total = len(context.cases)
    stream.write(
        f"{total} case{'' if total == 1 else 's'}, backend {before.backend}, {machine.model}, torch {machine.torch}, "
        f"triton {machine.triton or 'not installed'}, {_told(count)}\n"
    )
    stream.flush()
    session = _Session(total, stream)
    status = session.run(_arguments(options, context, count))
    if session.refusal:
        return _refused(session.refusal)
    if status == pytest.ExitCode.INTERRUPTED and not session.progress.errors:
        if session.interrupted:
            print(f"dsv4-matrix run: {session.interrupted}", file=sys.stderr)
        return INTERRUPTED
    if session.progress.errors or not session.results:
        told = [*session.progress.errors, session.progress.stopped]
        stream.writelines(f"{error.rstrip()}\n" for error in told if error)
        return BAD_INPUT if status == pytest.ExitCode.USAGE_ERROR else SHORT
    selected = [case.id for case in context.cases]
    stream.writelines(f"{line}\n" for line in reasons_text(session.kernels))
    good = tell(context.matrix, session.results, selected, session.messages, stream)
    if session.progress.stopped:
        stream.write(f"stopped: {session.progress.stopped}\n")
    code = GOOD if good and status == pytest.ExitCode.OK else SHORT
    if evidence is not None:
        # Which kernels serve is known where cases run, and so only now.
        kernels = header_text(session.kernels)
        report_of_run = Report(replace(context.header(), kernels=kernels), session.results)
        if reason := record_evidence(report_of_run, selected, replace(before, kernels=kernels), evidence):
            print(f"dsv4-matrix run: evidence not recorded: {reason}", file=sys.stderr)
            return SHORT
        stream.write(f"evidence recorded in {evidence}; 'dsv4-matrix table --write' brings it into README.md\n")
    return code


def _refused(reason: str) -> int:
    print(f"dsv4-matrix run: {as_of_command(reason)}", file=sys.stderr)
    return BAD_INPUT


def _told(workers: int) -> str:
    return "one process" if not workers else "1 worker" if workers == 1 else f"{workers} workers"


class _Session:
    """One pytest run, and what its controller knew at the end."""

    def __init__(self, total: int, stream: TextIO) -> None:
        self.progress = Progress(total, stream)
        self.results: tuple[Result, ...] = ()
        self.messages: dict[str, str] = {}
        self.refusal = ""
        self.interrupted = ""
        self.kernels: tuple[ServedCall, ...] = ()

    def run(self, arguments: list[str]) -> int:
        with _isolated():
            status = pytest.main(arguments, plugins=[self, self.progress])
        self.progress.close()
        return int(status)

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        """A worker that found the input to be bad ends the run; told as if it had been found here."""
        if error is not None and (refusal := read_refusal(node)):
            self.refusal = refusal
            pytest.exit(refusal, returncode=pytest.ExitCode.USAGE_ERROR)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        from dsv4_matrix.plugin import CONTEXT, CONTROLLER

        controller = session.config.stash[CONTROLLER]
        self.interrupted = controller.interrupted
        if controller.ledger is not None:
            self.results = controller.ledger.complete()
            self.messages = controller.messages
            self.kernels = session.config.stash[CONTEXT].kernels


def _arguments(options: Options, context: Context, workers: int) -> list[str]:
    arguments = [str(_SUITE), "-c", str(_SUITE / "pytest.ini"), "--rootdir", str(_SUITE)]
    arguments += ["-p", "no:terminal", "-p", "dsv4_matrix", "-p", "xdist"]
    # The matrix as it was found, whoever looks for it; a message names it as the user did, or not at all.
    arguments += ["--matrix", context.matrix.path, f"--matrix-repeat={shlex.join(options.repeat)}"]
    for name, value in (
        ("--matrix-backend", options.backend),
        ("--matrix-reference", options.reference),
        ("--matrix-cells", options.cells),
        ("--matrix-report", options.report),
        ("--matrix-shard", options.shard),
        ("--matrix-timeout", options.timeout),
        ("--matrix-seeds", options.seeds),
    ):
        if value is not None:
            arguments += [name, str(value)]
    if options.require_gpu:
        arguments.append("--matrix-require-gpu")
    if workers:
        arguments += ["-n", str(workers)]
    elif len(context.cases) == 1:
        arguments.append("--capture=no")  # somebody looks at this case: what its backend prints is for them
    return arguments


@contextmanager
def _isolated() -> Iterator[None]:
    """Neither the user's PYTEST_ADDOPTS nor other installed plugins decide a result."""
    names = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    saved = {name: os.environ.pop(name, None) for name in names}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _workers(asked: str | None, context: Context) -> int:
    """Processes to start; 0 is this one, for a single case too unless a timeout is to be held.

    Never more than there are cells to divide.
    """
    from dsv4_matrix.machine import worker_count
    from dsv4_matrix.shard.gpus import GpuListError
    from dsv4_matrix.shard.plan import units_of

    _ = context.cases, context.backend_name, context.timeout, context.seeds
    if asked is not None and asked != "auto" and not asked.isdecimal():
        raise BadInputError(f"-n {asked}: give 'auto' or a number of processes")
    units = len(units_of(context.cases, context.machine.kind))
    held = context.options.timeout is not None
    if asked is not None and asked != "auto":
        if held and not int(asked):
            raise BadInputError("--timeout: only a worker can be ended, and -n 0 has none; say -n 1, or leave one out")
        return min(int(asked), units)
    if len(context.cases) == 1:
        return 1 if held else 0
    try:
        count = min(worker_count(), units)
    except GpuListError as error:
        raise BadInputError(str(error)) from None
    return 0 if asked is None and count == 1 and not held else count


def _evidence_path(context: Context, record: str | os.PathLike[str] | None) -> Path | None:
    if record is None:
        return None
    if context.options.shard is not None:
        raise BadInputError(
            "--record: evidence is of the whole matrix, and --shard runs a part of it; give --report, and bring the "
            "reports together with 'dsv4-matrix merge --record'"
        )
    if context.options.seeds is not None:
        raise BadInputError("--record: evidence is of the declared seeds, and --seeds draws others; leave one out")
    if context.options.cells is not None:
        raise BadInputError(
            "--record: evidence is of the whole matrix, and --cells selects a part of it; leave one of the two out"
        )
    folder = Path.cwd() / record
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(f"--record {record}: cannot make the folder: {error.strerror}") from None
    path = folder / f"{context.machine.slug}.jsonl"
    canonical.check_writable(path)
    return path
