"""Results by case id as they arrive, in any order; at the end every declared case has exactly one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dsv4_matrix.declaration.model import Case
from dsv4_matrix.report.result import Outcome, Result

#: Why a case was not run that nobody asked for.
UNSELECTED = "not selected in this run"


class DuplicateResultError(ValueError):
    """Two results for one case: two tests ran it, or two workers did."""


@dataclass
class Ledger:
    """Collects results; ``complete`` turns what is missing into lines.

    Attributes:
        cases: every declared case by id, also those that this device does not run.
        not_here: why a declared case is not generated on this device, by id.
        planned: ids that the session set out to run.
    """

    cases: dict[str, Case]
    not_here: dict[str, str] = field(default_factory=dict)
    planned: set[str] = field(default_factory=set)
    results: dict[str, Result] = field(default_factory=dict)

    def record(self, result: Result) -> None:
        """Add ``result``; DuplicateResultError if its case has one already, KeyError if the case is not declared."""
        if result.id not in self.cases:
            raise KeyError(result.id)
        if result.id in self.results:
            raise DuplicateResultError(
                f"case {result.id} has two results: {self.results[result.id].outcome}, then "
                f"{result.outcome}; run each case in one test only"
            )
        self.results[result.id] = result

    def complete(self, unplanned: str = UNSELECTED) -> tuple[Result, ...]:
        """One result for every declared case, sorted by id: ``lost`` if planned, else ``not-run`` with the reason."""
        return tuple(
            self.results.get(case_id) or self._absent(case, unplanned) for case_id, case in sorted(self.cases.items())
        )

    def _absent(self, case: Case, unplanned: str) -> Result:
        if case.id in self.planned:
            outcome, reason = Outcome.LOST, "no result came back: its worker died or the run was stopped"
        else:
            outcome, reason = Outcome.NOT_RUN, self.not_here.get(case.id, unplanned)
        return Result(case.id, case.cell_id, case.kind, outcome, reason)


def fell_short(results: Iterable[Result]) -> tuple[Result, ...]:
    """Those that ran, or should have, and did not pass."""
    return tuple(result for result in results if result.outcome not in (Outcome.PASSED, Outcome.NOT_RUN))
