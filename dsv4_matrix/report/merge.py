"""Reports of several machines as one: the bytes that one machine would have written, in whatever order they come.

A report has a line for every declared case, so a shard's own says ``not-run`` of what other shards ran. Merging takes
for each case the one report that ran it. Two that did are an error, also when they agree: which one counts would
otherwise be a choice, and a repeated run could turn red into green.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields

from dsv4_matrix.report.result import Header, Outcome, Report, Result

#: ``device_model`` of a run through Triton's interpreter; any other is a GPU.
INTERPRETER = "CPU interpreter"


class MergeError(ValueError):
    """Reports that are not parts of one run; the message names files, and cases or header keys."""


def merge(reports: Sequence[tuple[str, Report]]) -> Report:
    """One report out of ``(name, report)`` pairs; names are for messages. Associative, and the order does not matter.

    Raises:
        MergeError: nothing to merge, headers that differ, or a case that two reports ran.
    """
    if not reports:
        raise MergeError("no report to merge")
    _same_header(reports)
    of_case: dict[str, list[tuple[str, Result]]] = {}
    for name, report in reports:
        for result in report.results:
            of_case.setdefault(result.id, []).append((name, result))
    doubles = [_told_twice(case_id, ran) for case_id, found in sorted(of_case.items()) if len(ran := _ran(found)) > 1]
    if doubles:
        raise MergeError("\n".join(doubles))
    merged = [(_ran(found) or [min(found, key=_by_reason)])[0][1] for _, found in sorted(of_case.items())]
    return Report(reports[0][1].header, tuple(merged))


def device_kind(header: Header) -> str:
    """``cpu`` or ``gpu``, as ``devices`` in matrix.yaml names it."""
    return "cpu" if header.device_model == INTERPRETER else "gpu"


def _ran(found: Sequence[tuple[str, Result]]) -> list[tuple[str, Result]]:
    return [(name, result) for name, result in found if result.outcome is not Outcome.NOT_RUN]


def _by_reason(found: tuple[str, Result]) -> tuple[str, ...]:
    """A total order over ``not-run`` lines of one case, so that the choice does not depend on who comes first."""
    return tuple(str(value) for value in astuple(found[1]))


def _told_twice(case_id: str, ran: Sequence[tuple[str, Result]]) -> str:
    told = ", ".join(sorted(f"{name} ({result.outcome})" for name, result in ran))
    return f"case {case_id} was run twice: {told}; shards are disjoint, so leave one report out"


def _same_header(reports: Sequence[tuple[str, Report]]) -> None:
    faults = []
    for f in fields(Header):
        by_value: dict[str, list[str]] = {}
        for name, report in reports:
            by_value.setdefault(getattr(report.header, f.name), []).append(name)
        if len(by_value) > 1:
            told = "; ".join(f"{value!r} in {', '.join(sorted(names))}" for value, names in sorted(by_value.items()))
            faults.append(f"{f.name} differs: {told}")
    if faults:
        raise MergeError("these reports are not of one run\n" + "\n".join(faults))
