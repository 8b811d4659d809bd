"""What one pytest process knows about its matrix run: options, and what they lead to, each loaded at first use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4_matrix.repeat import Repeat, as_words

if TYPE_CHECKING:
    from os import PathLike

    from dsv4_matrix.declaration.model import Case, Matrix
    from dsv4_matrix.execution import Setup
    from dsv4_matrix.machine import Machine
    from dsv4_matrix.report.kernels import ServedCall
    from dsv4_matrix.report.ledger import Ledger
    from dsv4_matrix.report.result import Header

#: Seconds that a case may take. A cold compile of all its kernels is a minute or two; a hung graph never ends.
TIMEOUT = 600.0


class BadInputError(Exception):
    """An option, file or machine that does not allow this run; the message is for the user, in the plugin's options."""


def as_of_command(message: str) -> str:
    """``message`` with the options of ``dsv4-matrix``, which lack the prefix that the plugin's have."""
    return message.replace("--matrix-", "--")


@dataclass(frozen=True)
class Options:
    """The plugin's options as given; None or False where they are not. Paths are absolute.

    ``repeat`` are the words of a command that would decide a case as these do, paths as the user wrote them.
    """

    matrix: Path | None
    backend: str | None
    reference: str | None
    cells: str | None
    report: Path | None
    require_gpu: bool
    search: Path
    explicit: bool  # some option was given, so a run without cases is a mistake
    named: bool = True  # some option was given or stands in the ini file: this project is about the matrix
    shard: str | None = None
    timeout: str | None = None
    seeds: str | None = None
    repeat: tuple[str, ...] = ()

    @classmethod
    def of_command(
        cls,
        *,
        matrix: str | PathLike[str] | None = None,
        backend: str | None = None,
        reference: str | None = None,
        cells: str | None = None,
        report: str | PathLike[str] | None = None,
        shard: str | None = None,
        timeout: str | None = None,
        seeds: str | None = None,
        require_gpu: bool = False,
    ) -> Options:
        """What a ``dsv4-matrix`` command was given, paths from the current directory.

        A command is about the matrix even without an option, so that one without cases is a mistake.
        """
        here = Path.cwd()
        written = None if matrix is None else os.fspath(matrix)
        return cls(
            matrix=None if matrix is None else here / matrix,
            backend=backend,
            reference=reference,
            cells=cells,
            report=None if report is None else here / report,
            require_gpu=require_gpu,
            search=here,
            explicit=True,
            shard=shard,
            timeout=timeout,
            seeds=seeds,
            repeat=as_words({"--matrix": written, "--reference": reference}),
        )


class Context:
    """Lazy: reading options costs nothing in the many pytest runs that have no ``matrix_case``."""

    def __init__(self, options: Options, *, elsewhere: bool = False) -> None:
        """``elsewhere``: cases run in other processes, so that this one can do without torch."""
        self.options = options
        self.elsewhere = elsewhere
        self._kernels_elsewhere: tuple[ServedCall, ...] = ()
        self._asked_elsewhere = False

    @cached_property
    def matrix(self) -> Matrix:
        from dsv4_matrix.declaration.find import find_matrix
        from dsv4_matrix.declaration.loader import load_matrix
        from dsv4_matrix.declaration.mistakes import DeclarationError

        try:
            return load_matrix(self.options.matrix or find_matrix(self.options.search))
        except DeclarationError as error:
            raise BadInputError(str(error)) from None

    @cached_property
    def machine(self) -> Machine:
        from dsv4_matrix.machine import find_machine, foresee_machine

        interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # asked before find_machine sets it
        machine = foresee_machine() if self.elsewhere else find_machine()
        if self.options.require_gpu and machine.kind != "gpu":
            asked = " (TRITON_INTERPRET=1 is set by the environment)" if interpreted else ""
            raise BadInputError(
                f"--matrix-require-gpu: torch {machine.torch} sees no usable GPU{asked}; check nvidia-smi and "
                f"CUDA_VISIBLE_DEVICES, or leave the option out to run through Triton's interpreter"
            )
        return machine

    @cached_property
    def selected(self) -> tuple[Case, ...]:
        """Cases that --matrix-cells selects, on whatever device they run; sorted by id."""
        from dsv4_matrix.selection import SelectionError, select

        try:
            return select(self.matrix.cases(), self.options.cells)
        except SelectionError as error:
            raise BadInputError(f"--matrix-cells: {error}") from None

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        """Selected cases that this device runs: never empty, sorted by id, the same in every process."""
        cases = self._here
        if not cases:
            raise BadInputError(
                f"none of the {len(self.selected)} selected cases is declared for this device ({self.machine.kind}); "
                f"a run of zero cases proves nothing"
            )
        if self.options.shard is None:
            return cases
        from dsv4_matrix.shard.plan import PlanError, cases_of_shard, parse_shard

        try:
            return cases_of_shard(cases, self.machine.kind, parse_shard(self.options.shard))
        except PlanError as error:
            raise BadInputError(f"--matrix-shard: {error}") from None

    @cached_property
    def _here(self) -> tuple[Case, ...]:
        """Selected cases that this device runs, in whatever shard."""
        here = {case.id for case in self.matrix.cases(self.machine.kind)}
        return tuple(case for case in self.selected if case.id in here)

    @cached_property
    def timeout(self) -> float:
        """Seconds that a case may take."""
        given = self.options.timeout
        try:
            seconds = TIMEOUT if given is None else float(given)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < 1e6:
            raise BadInputError(f"--matrix-timeout: {given!r} is not a number of seconds above 0")
        return seconds

    @cached_property
    def seeds(self) -> int:
        """How often each case is drawn, each time from another seed."""
        given = self.options.seeds
        if given is None:
            return 1
        if not (given.isascii() and given.isdecimal() and 1 <= int(given) <= 10_000):
            raise BadInputError(f"--matrix-seeds: {given!r} is not a number from 1 to 10000")
        return int(given)

    @cached_property
    def backend_name(self) -> str:
        """As ``setup`` has it, known without loading the backend; BadInputError if nothing is installed by it."""
        from dsv4_matrix.loading import LoadError, backend_name

        try:
            return backend_name(self.options.backend)
        except LoadError as error:
            raise BadInputError(str(error)) from error

    @cached_property
    def setup(self) -> Setup:
        """Everything that a case needs. The machine comes first: it decides how a backend's kernels are built."""
        from dsv4_matrix.execution import Setup
        from dsv4_matrix.loading import LoadError, load_backend, load_reference

        machine, options = self.machine, self.options
        try:
            backend = load_backend(options.backend, options.search)
            reference = load_reference(options.reference, options.search)
        except LoadError as error:
            raise BadInputError(str(error)) from error
        return Setup(self.matrix, machine, backend, reference, self.repeat)

    @property
    def repeat(self) -> Repeat:
        """The command that runs a case of this run again."""
        return Repeat(self.options.repeat)

    @property
    def kernels(self) -> tuple[ServedCall, ...]:
        """Which kernels the backend says serve this device, asked where cases run; () if it does not tell."""
        return self._kernels_elsewhere if self.elsewhere else self._kernels_here

    def learn_kernels(self, told: tuple[ServedCall, ...]) -> None:
        """Keep what a worker was told. BadInputError if another worker was told something else."""
        from dsv4_matrix.report.kernels import header_text

        if self._asked_elsewhere and told != self._kernels_elsewhere:
            texts = " and ".join(header_text(paths) or "nothing" for paths in (self._kernels_elsewhere, told))
            raise BadInputError(f"workers run different kernels, and a report is of one choice: {texts}")
        self._kernels_elsewhere, self._asked_elsewhere = told, True

    @cached_property
    def _kernels_here(self) -> tuple[ServedCall, ...]:
        from dsv4_matrix.report.kernels import KernelsError, kernel_paths

        backend = self.setup.backend
        try:
            return kernel_paths(backend.original, self.machine.torch_device)
        except KernelsError as error:
            raise BadInputError(f"backend {backend.name}: {error}") from None

    def ledger(self) -> Ledger:
        """Empty, over every declared case, with the reason for those that this device does not run."""
        from dsv4_matrix.report.ledger import Ledger

        here = {case.id for case in self.matrix.cases(self.machine.kind)}
        not_here = {
            case.id: f"declared for {' and '.join(case.variant.devices) if case.variant else 'another device'} only"
            for case in self.matrix.cases()
            if case.id not in here
        }
        mine = {case.id for case in self.cases}
        not_here |= {case.id: "in another shard" for case in self._here if case.id not in mine}
        return Ledger({case.id: case for case in self.matrix.cases()}, not_here)

    def header(self) -> Header:
        """Of a report on this run. BadInputError if the sources cannot be read."""
        from dsv4_matrix.report.fingerprint import SourcesMissingError, fingerprint
        from dsv4_matrix.report.kernels import header_text
        from dsv4_matrix.report.result import Header

        machine = self.machine
        try:
            sources = fingerprint(Path(self.matrix.path))
        except (OSError, SourcesMissingError) as error:
            raise BadInputError(f"no fingerprint of the sources: {error}") from None
        return Header(
            matrix_sha256=self.matrix.sha256,
            fingerprint=sources,
            backend=self.backend_name,
            device_model=machine.model,
            torch=machine.torch,
            triton=machine.triton,
            kernels=header_text(self.kernels),
        )
