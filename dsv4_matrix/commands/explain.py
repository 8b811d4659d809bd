"""``dsv4-matrix explain``: its options, and what one backend says of itself where it is asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4_matrix.commands import BAD_INPUT, GOOD, Add

if TYPE_CHECKING:
    from dsv4_matrix.report.kernels import DeclaredKernel


def add_commands(add: Add) -> None:
    """Register the command with ``add``."""
    made = add("explain", _explain, "tell everything about one cell or case")
    made.add_argument("name", metavar="CELL", help="a cell such as r4/verify-cg, or a case id")
    made.add_argument(
        "--backend",
        metavar="NAME|module:attr",
        help="load this one, as 'run' does, and ask it which kernels serve on this machine "
        "(default: what the installed ones declare, nothing imported)",
    )


def _explain(args: argparse.Namespace) -> int:
    from dsv4_matrix.declaration import find_matrix, load_matrix
    from dsv4_matrix.declaration.listing import UnknownNameError, explain_text, named
    from dsv4_matrix.loading import LoadError
    from dsv4_matrix.repeat import as_words
    from dsv4_matrix.report.kernels import KernelsError

    given = as_words({"--matrix": args.matrix, "--backend": args.backend})
    matrix = load_matrix(args.matrix if args.matrix is not None else find_matrix())
    try:
        named(matrix, args.name)  # a name that nothing has is told before a backend is loaded
        kernels = _declared() if args.backend is None else _asked(args.backend)
        print(explain_text(matrix, args.name, kernels, given))
    except (UnknownNameError, LoadError, KernelsError) as error:
        print(f"dsv4-matrix explain: {error}", file=sys.stderr)
        return BAD_INPUT
    return GOOD


def _declared() -> list[str]:
    """What all installed backends declare for all devices; imports none of them."""
    from dsv4_matrix.report.kernels import installed_tables

    return [line for name, table in installed_tables().items() for line in _table_lines(name, table)]


def _asked(selection: str) -> list[str]:
    """What the backend declares, and what it says of this machine; loads it. LoadError or KernelsError if it cannot."""
    from dsv4_matrix.loading import load_backend
    from dsv4_matrix.machine import find_machine
    from dsv4_matrix.report.kernels import KernelsError, declared_kernels, kernel_paths, reasons_text

    machine = find_machine()  # first: it decides how a backend's kernels are built
    backend = load_backend(selection, Path.cwd())
    try:
        served = reasons_text(kernel_paths(backend.original, machine.torch_device))
    except KernelsError as error:
        raise KernelsError(f"backend {backend.name}: {error}") from None
    return [
        *_table_lines(backend.name, declared_kernels(backend.name)),
        f"kernels of {backend.name} on this machine ({machine.model}), as it says itself:",
        *(f"  {line}" for line in served or ["it does not tell, as a backend with one kernel need not"]),
    ]


def _table_lines(name: str, table: Sequence[DeclaredKernel]) -> list[str]:
    from dsv4_matrix.report.kernels import table_text

    return [f"kernels of {name}, as it declares them:", *(f"  {text}" for text in table_text(table))] if table else []
