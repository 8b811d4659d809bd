"""Digests and promises of a report's cases: its reserved keys, which only runs that record bits fill.

A case's line then also has ``digests``, ``{tensor: {row key: sha256}}``, and ``promises``, its strongest level. Row
keys are logical: the needle of a composition keeps its key wherever it stands in the batch. The rest is the canonical
report as it is, and reads as such.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dsv4_matrix.declaration.model import Level
from dsv4_matrix.report import canonical
from dsv4_matrix.report.result import Report

__all__ = ["BitsReport", "CaseBits", "Level", "dumps", "loads"]


@dataclass(frozen=True)
class CaseBits:
    """Bits of one case: its promise, and digests by (tensor, row key)."""

    promise: Level
    digests: Mapping[tuple[str, str], str]


@dataclass(frozen=True)
class BitsReport:
    """A canonical report with the bits of those of its cases that recorded any, by case id."""

    report: Report
    bits: Mapping[str, CaseBits]


def dumps(whole: BitsReport) -> bytes:
    """Canonical bytes of the report with digests. ReportError for bits of a case that the report does not have."""
    lines = canonical.dumps(whole.report).decode("ascii").splitlines()
    unknown = whole.bits.keys() - {result.id for result in whole.report.results}
    if unknown:
        raise canonical.ReportError(f"digests of {', '.join(sorted(unknown))}, which the report does not have")
    written = [lines[0]]
    for line in lines[1:]:
        value = json.loads(line)
        if case := whole.bits.get(value["id"]):
            tensors: dict[str, dict[str, str]] = {}
            for (tensor, row), digest in case.digests.items():
                _check_digest(digest, value["id"])
                tensors.setdefault(tensor, {})[row] = digest
            value |= {"digests": tensors, "promises": case.promise.value}
        written.append(canonical.encode(value))
    return ("\n".join(written) + "\n").encode("ascii")


def loads(data: bytes, path: str = "report") -> BitsReport:
    """The report in ``data`` with its bits. ReportError, with ``path:line``, for anything ``dumps`` does not write."""
    report = canonical.loads(data, path)
    bits: dict[str, CaseBits] = {}
    for number, line in enumerate(data.decode("ascii").splitlines()[1:], start=2):
        value = json.loads(line)
        if "digests" in value or "promises" in value:
            bits[value["id"]] = _case(value, f"{path}:{number}")
    return BitsReport(report, bits)


def _case(value: Mapping[str, object], place: str) -> CaseBits:
    tensors, promise = value.get("digests"), value.get("promises")
    if not isinstance(tensors, dict) or not all(isinstance(rows, dict) and rows for rows in tensors.values()):
        raise canonical.ReportError(f"{place}: digests must be {{tensor: {{row: sha256}}}}, with at least one row each")
    if promise not in list(Level):
        raise canonical.ReportError(f"{place}: promises {promise!r} is none of {', '.join(Level)}")
    digests = {}
    for tensor, rows in tensors.items():
        for row, digest in rows.items():
            _check_digest(digest, place)
            digests[tensor, row] = digest
    return CaseBits(Level(str(promise)), digests)


def _check_digest(digest: object, place: str) -> None:
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise canonical.ReportError(f"{place}: {digest!r} is not a SHA-256 in lower-case hex")
