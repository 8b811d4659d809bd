"""What keeps a report from being of the whole declaration, told so that a missing shard is read at a glance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dsv4_matrix.declaration.model import Case, Matrix
from dsv4_matrix.report.merge import MergeError, device_kind
from dsv4_matrix.report.result import Outcome, Report, Result


@dataclass(frozen=True)
class Gap:
    """One kind of gap.

    Attributes:
        head: ``41 missing, declared for this device but in no report``.
        names: of whole cells, ``r4/cg-decode (7 cases)``, then the ids of single cases; each sorted.
    """

    head: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Gaps:
    """What a report lacks; each a tuple of case ids, sorted.

    Attributes:
        missing: declared for the report's device, and run by nobody.
        lost: begun, but its worker died or the run was stopped.
        undeclared: in the report, but not in the declaration.
        cells: ids of the cases that are declared for the device, by ``Case.unit``.
    """

    missing: tuple[str, ...]
    lost: tuple[str, ...]
    undeclared: tuple[str, ...]
    cells: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def told(self) -> tuple[Gap, ...]:
        """One for each kind of gap; empty if there is none."""
        kinds = (
            (self.missing, "missing, declared for this device but in no report"),
            (self.lost, "lost, no result came back"),
            (self.undeclared, "not declared in this matrix.yaml"),
        )
        return tuple(Gap(f"{len(ids)} {what}", self._names(ids)) for ids, what in kinds if ids)

    def _names(self, ids: tuple[str, ...]) -> tuple[str, ...]:
        left, whole = set(ids), []
        for cell, cases in self.cells.items():
            if len(cases) > 1 and left.issuperset(cases):
                whole.append(f"{cell} ({len(cases)} cases)")
                left.difference_update(cases)
        return (*sorted(whole), *sorted(left))


def gaps(report: Report, matrix: Matrix) -> Gaps:
    """What ``report`` lacks to be of all cases that ``matrix`` declares for its device.

    Raises:
        MergeError: the report was made with another matrix.yaml, so nothing can be said.
    """
    if report.header.matrix_sha256 != matrix.sha256:
        raise MergeError(
            f"the report was made with a matrix.yaml of sha256 {report.header.matrix_sha256[:12]}, {matrix.path} has "
            f"{matrix.sha256[:12]}; name the right one with --matrix, or run again"
        )
    results = {result.id: result for result in report.results}
    here = matrix.cases(device_kind(report.header))
    cells: dict[str, tuple[str, ...]] = {}
    for case in here:
        cells[case.unit] = (*cells.get(case.unit, ()), case.id)
    return Gaps(
        missing=_ids(case for case in here if case.id not in results or results[case.id].outcome is Outcome.NOT_RUN),
        lost=_ids(result for result in report.results if result.outcome is Outcome.LOST),
        undeclared=tuple(sorted(results.keys() - {case.id for case in matrix.cases()})),
        cells=cells,
    )


def _ids(found: Iterable[Case | Result]) -> tuple[str, ...]:
    return tuple(sorted(one.id for one in found))
