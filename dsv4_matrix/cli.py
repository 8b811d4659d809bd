"""The ``dsv4-matrix`` command: thin, and quick where nothing runs (no torch, no triton, imports at first use).

Exit status: 0 good, 1 something fell short or drifted, 2 bad input. Results go to stdout, errors to stderr.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4_matrix import __version__
from dsv4_matrix.commands import BAD_INPUT, GOOD, SHORT, Command, bench, explain, gate, reports

if TYPE_CHECKING:
    from dsv4_matrix.declaration.model import Matrix

#: What a shell reports for a command whose reader went away (128 + SIGPIPE).
READER_GONE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. Arguments are ``sys.argv`` unless given."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller (`>&-`): the exit status and the files still count
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        # A terminal that cannot show a check mark gets an escape, not a traceback.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = _dispatch(_parsed(argv))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe has seen enough (`| head`). Python would complain again when it closes stdout.
        _drop_stdout()
        return READER_GONE
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        # Only a stream has no name: stdout is a file on a full disk, say.
        _drop_stdout()
        print(f"dsv4-matrix: cannot write to stdout: {error.strerror}", file=sys.stderr)
        return SHORT
    except KeyboardInterrupt:
        return 130
    return status


def _drop_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(args: argparse.Namespace) -> int:
    from dsv4_matrix.declaration.mistakes import DeclarationError

    command: Command = args.command
    try:
        return command(args)
    except DeclarationError as error:
        count = len(error.mistakes)
        print(f"{error}\n{count} mistake{'' if count == 1 else 's'} in the declaration", file=sys.stderr)
        return BAD_INPUT


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """As ``parse_args``, which shows the usage of all commands, not of the one that was given too much."""
    args, unknown = _parser().parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dsv4-matrix", description="Conformance matrix for DeepSeek-V4 sparse attention.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"dsv4-matrix {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, command: Command, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
        made.set_defaults(command=command, parser=made)
        made.add_argument(
            "--matrix", metavar="PATH", help="declaration (default: matrix.yaml here, else the packaged one)"
        )
        return made

    add("check", _check, "validate the declaration and count what it declares")
    made = add("list", _list, "list cells and case ids")
    made.add_argument("--json", action="store_true", help="for programs: cells with their variants")
    explain.add_commands(add)
    made = add("table", _table, "compare the README with the declaration and the evidence, or bring it up to date")
    what = made.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="print a diff and exit 1 if the README is behind")
    what.add_argument("--write", action="store_true", help="rewrite the blocks between the markers")
    made.add_argument("--readme", metavar="PATH", help="default: README.md beside the declaration")
    made.add_argument("--evidence", metavar="DIR", help="default: evidence/ beside the declaration")
    made = add("run", _run, "run every covered case and every probe on this machine")
    made.add_argument(
        "--backend", metavar="NAME|module:attr", help="backend under test (default: the only one installed)"
    )
    made.add_argument(
        "--reference", metavar="NAME|module:attr", help="reference to judge by (default: the one installed)"
    )
    made.add_argument("--cells", metavar="EXPR", help="fnmatch patterns on case ids, comma means or: 'r4-cg-decode-*'")
    made.add_argument("--record", metavar="DIR", help="write this device's evidence there, if the run was whole")
    made.add_argument("--report", metavar="PATH", help="write the canonical report there, telemetry beside it")
    made.add_argument("--require-gpu", action="store_true", help="fail where there is no usable GPU")
    made.add_argument(
        "-n",
        dest="workers",
        metavar="N",
        help="processes: a number, 0 for this one, or 'auto', one a GPU, else one a CPU "
        "(default: auto, but this process alone on one GPU or for one cell, unless there is a --timeout)",
    )
    made.add_argument("--shard", metavar="I/N", help="run the I-th of N parts, whole cells; see 'dsv4-matrix plan'")
    made.add_argument("--seeds", metavar="N", help="draw each case from N seeds (default: 1)")
    made.add_argument("--timeout", metavar="SECONDS", help="end and replace a worker whose case takes longer")
    for subject in (gate, bench, reports):
        subject.add_commands(add)
    return parser


def _load(args: argparse.Namespace) -> Matrix:
    from dsv4_matrix.declaration import find_matrix, load_matrix

    return load_matrix(args.matrix if args.matrix is not None else find_matrix())


def _check(args: argparse.Namespace) -> int:
    from dsv4_matrix.declaration.listing import counts_text

    matrix = _load(args)
    print(f"{matrix.path}\n{counts_text(matrix)}")
    return GOOD


def _list(args: argparse.Namespace) -> int:
    from dsv4_matrix.declaration.listing import cells_json, cells_text

    matrix = _load(args)
    if args.json:
        import json

        print(json.dumps(cells_json(matrix), indent=2))
    else:
        print(cells_text(matrix))
    return GOOD


def _table(args: argparse.Namespace) -> int:
    from dsv4_matrix.declaration import readme
    from dsv4_matrix.declaration.table import matrix_markdown
    from dsv4_matrix.report.canonical import ReportError
    from dsv4_matrix.report.evidence import evidence_markdown

    matrix = _load(args)
    root = Path(matrix.path).parent
    path = Path(args.readme) if args.readme else root / "README.md"
    evidence = Path(args.evidence) if args.evidence else root / "evidence"
    try:
        blocks = {"matrix": matrix_markdown(matrix), "evidence": evidence_markdown(matrix, evidence)}
        if args.check:
            difference = readme.drift(path, blocks, _writes(args))
            if difference:
                print(difference)
            return SHORT if difference else GOOD
        changed = readme.update(path, blocks)
        print(f"{path}: {'brought up to date' if changed else 'is up to date'}")
    except (readme.ReadmeError, ReportError) as error:
        print(f"dsv4-matrix table: {error}", file=sys.stderr)
        return BAD_INPUT
    return GOOD


def _writes(args: argparse.Namespace) -> str:
    """The command that brings up to date what this one compares: the same files."""
    given = {"--matrix": args.matrix, "--readme": args.readme, "--evidence": args.evidence}
    options = [part for option, value in given.items() if value for part in (option, str(value))]
    return shlex.join(["dsv4-matrix", "table", "--write", *options])


def _run(args: argparse.Namespace) -> int:
    from dsv4_matrix.session import run_matrix

    return run_matrix(
        matrix=args.matrix,
        backend=args.backend,
        reference=args.reference,
        cells=args.cells,
        workers=args.workers,
        report=args.report,
        record=args.record,
        shard=args.shard,
        timeout=args.timeout,
        seeds=args.seeds,
        require_gpu=args.require_gpu,
    )


if __name__ == "__main__":
    sys.exit(main())
