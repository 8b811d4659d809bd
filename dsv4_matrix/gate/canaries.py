"""Three defects that each gate run commits on purpose: a gate that does not notice them has proved nothing.

The comparison itself is handed in, so that a broken one is caught whatever it says about the real runs.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dsv4_matrix.environment import Attestation
from dsv4_matrix.gate.compare import Compare, Run, Verdict
from dsv4_matrix.report.bits import BitsReport, CaseBits, Level
from dsv4_matrix.report.digest import digest
from dsv4_matrix.report.result import Header, Outcome, Report, Result

_CASE, _TENSOR = "canary", "out"
_ROWS = ("needle", "filler-1", "filler-2", "filler-3")
_KEYS = 640

#: A run without digests: nothing that could be altered, which is no fault of the comparison's.
UNTRIED = "there is no digest to alter"


def uncaught(judge: Compare) -> tuple[str, ...]:
    """Canaries that ``judge`` lets through, in words; empty if it catches all and accepts the sound pair.

    ``judge`` is ``compare`` at some level, with a minimum of one row: the canaries are of few rows.
    """
    rows = {key: _sum(_keys(key), splits=1) for key in _ROWS}
    sound = _run("a", rows)
    found = []
    if not judge(sound, _run("b", rows)).aligned:
        found.append("two equal runs are said to differ")

    flipped = dict(rows)
    flipped["filler-2"] = _flip(rows["filler-2"])
    if _places(judge(sound, _run("b", flipped))) != {(_CASE, _TENSOR, "filler-2")}:
        found.append("one flipped bit is not reported at its row")

    swapped = {**rows, "needle": rows["filler-1"], "filler-1": rows["needle"]}
    if _places(judge(sound, _run("b", swapped))) != {(_CASE, _TENSOR, row) for row in ("needle", "filler-1")}:
        found.append("two exchanged rows are not reported")

    among = {"needle": _sum(_keys("needle"), splits=4)}  # the defect: as many splits as there are rows in the batch
    alone = {"needle": rows["needle"]}
    if not judge(_run("a", among), _run("b", among)).aligned:
        found.append("a batch-variant kernel is said to differ in equal batches")
    if judge(_run("a", alone), _run("b", among)).aligned:
        found.append("a batch-variant kernel is not seen in another batch")
    return tuple(found)


def uncaught_in(run: Run, judge: Compare, level: Level) -> tuple[str, ...]:
    """The same with a run's own digests: one altered, and two rows of a tensor exchanged, in a copy of the run."""
    copy = replace(run, id=f"{run.id} copied")
    covered = {case: bits.digests for case, bits in run.report.bits.items() if bits.promise.covers(level)}
    place = next(((case, key) for case, digests in sorted(covered.items()) for key in sorted(digests)), None)
    if place is None:
        return (UNTRIED,)
    case, key = place
    digests = covered[case]
    found = []
    altered = {**digests, key: digests[key][:-1] + ("0" if digests[key][-1] != "0" else "1")}
    if _places(judge(run, _with(copy, case, altered))) != {(case, *key)}:
        found.append(f"an altered digest of case {case} tensor {key[0]} row {key[1]} is not reported")
    other = next((row for row in sorted(digests) if row[0] == key[0] and digests[row] != digests[key]), None)
    if other is not None:
        exchanged = {**digests, key: digests[other], other: digests[key]}
        if _places(judge(run, _with(copy, case, exchanged))) != {(case, *key), (case, *other)}:
            found.append(f"exchanged rows {key[1]} and {other[1]} of case {case} tensor {key[0]} are not reported")
    return tuple(found)


def _keys(row: str) -> tuple[float, ...]:
    """Numbers of widely different size, fixed by the row's name, whose sum shows its order in the last bits."""
    state = sum(byte << 8 * at for at, byte in enumerate(row.encode()[-4:]))
    values = []
    for _ in range(_KEYS):
        state = (1103515245 * state + 12345) % 2**31
        values.append((state - 2**30) * 2.0 ** -(state % 59))
    return tuple(values)


def _sum(values: Sequence[float], splits: int) -> bytes:
    """fp64 sum in ``splits`` equal parts, each in order, as bytes."""
    width = -(-len(values) // splits)
    total = 0.0
    for first in range(0, len(values), width):
        part = 0.0
        for value in values[first : first + width]:
            part += value
        total += part
    return struct.pack("<d", total)


def _flip(data: bytes) -> bytes:
    return bytes([data[0] ^ 1, *data[1:]])


def _run(name: str, rows: Mapping[str, bytes]) -> Run:
    """A run of one case with these rows."""
    digests = {(_TENSOR, key): digest(_TENSOR, "float64", (1,), data) for key, data in rows.items()}
    result = Result(_CASE, "r0/decode", "case", Outcome.PASSED, "", "0.50", 0, 0)
    report = Report(Header("", "", _CASE, "", "", ""), (result,))
    return Run(name, BitsReport(report, {_CASE: CaseBits(Level.DEVICE, digests)}), (Attestation((), (), ()),))


def _with(run: Run, case: str, digests: Mapping[tuple[str, str], str]) -> Run:
    bits = {**run.report.bits, case: replace(run.report.bits[case], digests=digests)}
    return replace(run, report=replace(run.report, bits=bits))


def _places(verdict: Verdict) -> set[tuple[str, str, str]]:
    return {(mismatch.case, mismatch.tensor, mismatch.row) for mismatch in verdict.mismatched}
