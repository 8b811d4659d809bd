"""Compares the bits of two runs: no tolerance, no second try, and no comparison of runs that may differ.

Rows are paired by (case, tensor, logical row key). Agreement proves nothing about being right, since two runs agree on
the same wrong zeros, so each compared case must have passed its own judgement in both runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from dsv4_matrix.environment import Attestation, disagreements
from dsv4_matrix.report.bits import BitsReport, Level
from dsv4_matrix.report.result import Outcome, Result


@dataclass(frozen=True)
class Run:
    """What one run left behind.

    Attributes:
        id: made anew by the gate for each run; the run writes it back.
        report: canonical report with digests.
        attestations: one a worker.
    """

    id: str
    report: BitsReport
    attestations: tuple[Attestation, ...]


@dataclass(frozen=True)
class Mismatch:
    """One row that differs: digests of run A and B, and the first differing bits where they were kept."""

    case: str
    tensor: str
    row: str
    a: str
    b: str
    detail: str = ""

    def __str__(self) -> str:
        told = self.detail or f"digest {self.a[:16]} against {self.b[:16]}"
        return f"case {self.case} tensor {self.tensor} row {self.row}: {told}"


@dataclass(frozen=True)
class Verdict:
    """Whether two runs are aligned, and why not.

    Attributes:
        aligned: everything below says so.
        compared: rows whose bits agree or differ.
        mismatched: rows that differ.
        missing_in_a, missing_in_b: ``case tensor row`` that only the other run has.
        fell_short: cases that a run lost or that did not pass their own judgement.
        refused: why the runs were not compared at all; empty if they were.
    """

    aligned: bool
    compared: int = 0
    mismatched: tuple[Mismatch, ...] = ()
    missing_in_a: tuple[str, ...] = ()
    missing_in_b: tuple[str, ...] = ()
    fell_short: tuple[str, ...] = ()
    refused: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    def __str__(self) -> str:
        if self.refused:
            return f"not compared: {self.refused}"
        lines = [f"{self.compared} rows compared, {len(self.mismatched)} differ"]
        lines += [f"  {mismatch}" for mismatch in self.mismatched]
        for run, missing in (("A", self.missing_in_a), ("B", self.missing_in_b)):
            lines += [f"  missing in run {run}: {what}" for what in missing]
        lines += [f"  {case}" for case in self.fell_short]
        return "\n".join(lines)


#: (case, tensor, row) -> the first differing bits in words, or an empty string
Detail = Callable[[str, str, str], str]
Compare = Callable[[Run, Run], Verdict]


def compare(a: Run, b: Run, *, level: Level, minimum: int = 1, detail: Detail | None = None) -> Verdict:
    """The verdict on two runs.

    Args:
        level: what differed between the runs; cases that promise less are left out.
        minimum: rows that must be compared at least; fewer are not aligned, nor are none.
        detail: describes a mismatch, where raw bits were kept.
    """
    if reason := _refusal(a, b):
        return Verdict(aligned=False, refused=reason)
    results = [{result.id: result for result in run.report.report.results} for run in (a, b)]
    ids = sorted(results[0].keys() | results[1].keys())
    fell_short = tuple(line for case in ids for line in _fell_short(case, results[0].get(case), results[1].get(case)))
    rows = [_rows(run, level) for run in (a, b)]
    both = sorted(rows[0].keys() & rows[1].keys())
    mismatched = tuple(
        Mismatch(*key, rows[0][key], rows[1][key], detail(*key) if detail else "")
        for key in both
        if rows[0][key] != rows[1][key]
    )
    missing_in_a = tuple(" ".join(key) for key in sorted(rows[1].keys() - rows[0].keys()))
    missing_in_b = tuple(" ".join(key) for key in sorted(rows[0].keys() - rows[1].keys()))
    if len(both) < max(minimum, 1):
        fell_short += (f"{len(both)} rows at level {level.value}, at least {max(minimum, 1)} are needed",)
    return Verdict(
        aligned=not (mismatched or missing_in_a or missing_in_b or fell_short),
        compared=len(both),
        mismatched=mismatched,
        missing_in_a=missing_in_a,
        missing_in_b=missing_in_b,
        fell_short=fell_short,
    )


def _refusal(a: Run, b: Run) -> str:
    """Why the two cannot be compared; empty if they can."""
    if a.id == b.id:
        return f"both reports are of run {a.id}; a run is not compared with itself"
    if a.report.report.header != b.report.report.header:
        left, right = asdict(a.report.report.header), asdict(b.report.report.header)
        unlike = (f"{name} {left[name]} against {right[name]}" for name in sorted(left) if left[name] != right[name])
        return f"the reports are of different things: {', '.join(unlike)}"
    for name, run in (("A", a), ("B", b)):
        if not run.attestations:
            return f"run {name} attested no environment"
    first, *others = (*a.attestations, *b.attestations)
    if first.faults:
        return "; ".join(first.faults)
    for other in others:
        if unlike_here := disagreements(first, other):
            return "; ".join(unlike_here)
    return ""


def _rows(run: Run, level: Level) -> dict[tuple[str, str, str], str]:
    """Digests by (case, tensor, row) of the cases that promise ``level``."""
    return {
        (case, tensor, row): digest
        for case, bits in run.report.bits.items()
        if bits.promise.covers(level)
        for (tensor, row), digest in bits.digests.items()
    }


def _fell_short(case: str, a: Result | None, b: Result | None) -> list[str]:
    """What is wrong with one case's outcomes; a case that neither run planned is nobody's fault."""
    if a is None or b is None:
        return [f"case {case} is in one report only"]
    if a.outcome is Outcome.NOT_RUN and b.outcome is Outcome.NOT_RUN:
        return []
    return [
        f"case {case} is {result.outcome.value} in run {name}: {result.reason or 'no reason given'}"
        for name, result in (("A", a), ("B", b))
        if result.outcome is not Outcome.PASSED
    ]
