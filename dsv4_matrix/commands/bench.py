"""``dsv4-matrix bench``: its options, for the package ``bench``."""

from __future__ import annotations

import argparse
from pathlib import Path

from dsv4_matrix.commands import Add


def add_commands(add: Add) -> None:
    """Register the command with ``add``."""
    made = add("bench", _bench, "time a FlashMLA-compatible kernel on this GPU against floors and a peer's table")
    made.add_argument("--kernel", metavar="NAME|module:attr", help="function to time (default: the only one installed)")
    made.add_argument("--shapes", metavar="EXPR", help="fnmatch patterns on the 41 names, comma means or: 'c4-h64-*'")
    made.add_argument("--long", action="store_true", help="contexts of 1M tokens and prompts of 8192 rows")
    made.add_argument("--steps", action="store_true", help="metadata, stores and a whole decode step of a backend")
    made.add_argument("--backend", metavar="NAME|module:attr", help="backend for --steps (default: the one installed)")
    made.add_argument("--json", metavar="PATH", type=Path, help="write what is measured there, after each shape")
    made.add_argument("--plot", metavar="PATH.svg", type=Path, help="draw times against floors and the peer there")
    made.add_argument("--from", dest="source", metavar="PATH", type=Path, help="render that JSON instead of measuring")
    made.add_argument("--table", action="store_true", help="with --from: as Markdown")


def _bench(args: argparse.Namespace) -> int:
    from dsv4_matrix.bench.command import run_bench
    from dsv4_matrix.bench.request import Request

    names = ("kernel", "backend", "shapes", "long", "steps", "json", "plot", "source", "table")
    return run_bench(Request(**{name: getattr(args, name) for name in names}))
