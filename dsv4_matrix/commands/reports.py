"""Commands of ``dsv4-matrix`` over plans and reports: plan, merge, summary, html, junit. None of them needs torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dsv4_matrix.commands import BAD_INPUT, GOOD, SHORT, Add, Command
from dsv4_matrix.declaration import find_matrix, load_matrix
from dsv4_matrix.declaration.model import Matrix
from dsv4_matrix.report import canonical, telemetry
from dsv4_matrix.report.gaps import Gaps, gaps
from dsv4_matrix.report.html import Told, page
from dsv4_matrix.report.junit import junit_xml
from dsv4_matrix.report.ledger import UNSELECTED, fell_short
from dsv4_matrix.report.merge import MergeError, merge
from dsv4_matrix.report.result import Outcome, Report, Result
from dsv4_matrix.report.summary import summary_markdown
from dsv4_matrix.report.telemetry import Telemetry, telemetry_path
from dsv4_matrix.selection import SelectionError, select
from dsv4_matrix.shard.plan import PlanError, Unit, divide, shards_of, units_text

#: Faults of what the user gave; each is told on one line and ends with status 2.
_BAD = (canonical.ReportError, SelectionError, PlanError)


def add_commands(add: Add) -> None:
    """Register the commands with ``add``."""
    made = add("plan", _told("plan", _plan), "show which cells each shard, and each worker of it, runs")
    made.add_argument("--shards", type=int, required=True, metavar="N", help="number of shards")
    made.add_argument("--workers", type=int, default=1, metavar="N", help="workers of each shard (default: 1)")
    made.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="where it will run (default: gpu)")
    made.add_argument("--cells", metavar="EXPR", help="fnmatch patterns on case ids, as of 'dsv4-matrix run'")
    made.add_argument("--json", action="store_true", help="for programs")
    made = add(
        "merge", _told("merge", _merge), "put the reports of several shards together and see that nothing is missing"
    )
    made.add_argument("reports", nargs="+", type=Path, metavar="REPORT")
    made.add_argument("--out", type=Path, metavar="PATH", help="write the merged report there, telemetry beside it")
    made.add_argument("--record", type=Path, metavar="DIR", help="write it as the device's evidence, if all cases ran")
    made.add_argument("--json", action="store_true", help="for programs: every case that is missing, lost or short")
    made = add("summary", _told("summary", _summary), "print a report as Markdown, for GITHUB_STEP_SUMMARY")
    made.add_argument("report", type=Path, metavar="REPORT")
    made.add_argument("--title", default="dsv4-matrix", help="of its heading")
    made = add("html", _told("html", _html), "write reports, one a device, as one page that needs no network")
    made.add_argument("reports", nargs="+", type=Path, metavar="REPORT")
    made.add_argument("--out", type=Path, required=True, metavar="PATH")
    made = add("junit", _told("junit", _junit), "write a report as JUnit XML")
    made.add_argument("report", type=Path, metavar="REPORT")
    made.add_argument("--out", type=Path, required=True, metavar="PATH")


def _told(name: str, command: Command) -> Command:
    def guarded(args: argparse.Namespace) -> int:
        try:
            return command(args)
        except _BAD as error:
            print(f"dsv4-matrix {name}: {error}", file=sys.stderr)
            return BAD_INPUT
        except MergeError as error:
            print(f"dsv4-matrix {name}: {error}", file=sys.stderr)
            return SHORT

    return guarded


def _reports(args: argparse.Namespace) -> list[Path]:
    """The reports named, without the telemetry beside them: a shell's ``*.jsonl`` finds both."""
    paths = [path for path in args.reports if not path.name.endswith(telemetry.SUFFIX)]
    if not paths:
        raise canonical.ReportError("only telemetry is named; name the reports beside it")
    return paths


def _matrix(args: argparse.Namespace) -> Matrix:
    return load_matrix(args.matrix if args.matrix is not None else find_matrix())


def _plan(args: argparse.Namespace) -> int:
    matrix = _matrix(args)
    here = {case.id for case in matrix.cases(args.device)}
    cases = [case for case in select(matrix.cases(), args.cells) if case.id in here]
    if args.shards < 1 or args.workers < 1:
        raise PlanError(f"got --shards {args.shards}, --workers {args.workers}; give at least one shard and one worker")
    shards = shards_of(cases, args.device, args.shards)
    if args.json:
        print(json.dumps({"device": args.device, "shards": _plan_json(shards, args.workers)}, indent=2))
    else:
        print("\n".join(_plan_lines(shards, args.workers)))
    return GOOD


def _plan_json(shards: Sequence[Sequence[Unit]], workers: int) -> list[dict[str, object]]:
    return [
        {
            "shard": f"{index}/{len(shards)}",
            "cost": sum(unit.cost for unit in units),
            "workers": [[unit.id for unit in place] for place in divide(units, workers)],
            "cells": [{"id": unit.id, "cost": unit.cost, "cases": list(unit.cases)} for unit in units],
        }
        for index, units in enumerate(shards, start=1)
    ]


def _plan_lines(shards: Sequence[Sequence[Unit]], workers: int) -> list[str]:
    lines: list[str] = []
    width = max(len(unit.id) for units in shards for unit in units)
    for index, units in enumerate(shards, start=1):
        cost, cases = sum(unit.cost for unit in units), sum(len(unit.cases) for unit in units)
        lines.append(f"shard {index}/{len(shards)}: {units_text(units)}; {_count(cases, 'case')}, cost {cost}")
        for number, place in enumerate(divide(units, workers), start=1):
            if workers > 1:
                lines.append(f"  worker {number}: cost {sum(unit.cost for unit in place)}")
            lines += [
                f"    {unit.id:<{width}}  {_count(len(unit.cases), 'case'):<9} cost {unit.cost}" for unit in place
            ]
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _merge(args: argparse.Namespace) -> int:
    matrix, paths = _matrix(args), _reports(args)
    merged = merge([(str(path), canonical.read(path)) for path in paths])
    lacking = gaps(merged, matrix)
    if args.out is not None:
        canonical.write(merged, args.out)
        telemetry.write(_telemetry(paths).values(), telemetry_path(args.out))
    for gap in lacking.told():
        print("\n  ".join([f"dsv4-matrix merge: {gap.head}:", *gap.names]), file=sys.stderr)
    missing = frozenset(lacking.missing)
    if left_out := sum(result.id in missing and result.reason == UNSELECTED for result in merged.results):
        print(
            f"dsv4-matrix merge: {left_out} of the missing were left out by --cells where the reports were made; "
            "a merge is of the whole matrix, so run the shards without it",
            file=sys.stderr,
        )
    short, whole = fell_short(merged.results), not lacking.told()
    passed = sum(result.outcome is Outcome.PASSED for result in merged.results)
    if args.json:
        print(json.dumps(_merge_json(len(paths), passed, short, lacking), indent=2))
    else:
        for result in short:
            print(f"{result.outcome} {result.id}: {_first_line(result.reason)}")
        complete = "complete" if whole else "incomplete"
        print(f"{_count(len(paths), 'report')}, {complete}: {passed} passed, {len(short)} short")
    if args.record is not None:
        if not whole:
            print("dsv4-matrix merge: evidence not recorded: the reports are not of the whole matrix", file=sys.stderr)
            return SHORT
        _record(merged, args.record)
    return GOOD if whole and not short else SHORT


def _merge_json(reports: int, passed: int, short: Sequence[Result], lacking: Gaps) -> dict[str, object]:
    return {
        "reports": reports,
        "complete": not lacking.told(),
        "passed": passed,
        "short": [{"id": r.id, "outcome": r.outcome.value, "reason": _first_line(r.reason)} for r in short],
        "missing": list(lacking.missing),
        "lost": list(lacking.lost),
        "undeclared": list(lacking.undeclared),
    }


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _record(report: Report, folder: Path) -> None:
    from dsv4_matrix.machine import slug

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise canonical.ReportError(f"{folder}: cannot make the folder: {error.strerror}") from None
    canonical.write(report, folder / f"{slug(report.header.device_model)}.jsonl")


def _summary(args: argparse.Namespace) -> int:
    matrix, report = _matrix(args), canonical.read(args.report)
    print(summary_markdown(matrix, report, gaps(report, matrix), _messages([args.report]), args.title), end="")
    return GOOD


def _html(args: argparse.Namespace) -> int:
    matrix = _matrix(args)
    told = []
    for path in _reports(args):
        report = canonical.read(path)
        told.append(Told(report, gaps(report, matrix), _messages([path])))
    try:
        text = page(matrix, told)
    except ValueError as error:
        raise canonical.ReportError(f"{error}; put shards together with 'dsv4-matrix merge' first") from None
    canonical.write_in_one_step(text.encode(), args.out)
    return GOOD


def _junit(args: argparse.Namespace) -> int:
    canonical.write_in_one_step(junit_xml(canonical.read(args.report), _telemetry([args.report])), args.out)
    return GOOD


def _telemetry(reports: Sequence[Path]) -> Mapping[str, Telemetry]:
    """What lies beside ``reports``, by case id; nothing where a report came alone."""
    found = (telemetry_path(path) for path in reports)
    return {entry.id: entry for path in found if path.exists() for entry in telemetry.read(path)}


def _messages(reports: Sequence[Path]) -> dict[str, str]:
    return {case_id: entry.message for case_id, entry in _telemetry(reports).items() if entry.message}
