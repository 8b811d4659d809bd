"""A matrix run of one toy kernel, without torch, with a switchable defect: what the gate starts in its tests."""

from __future__ import annotations

import os
import struct
import sys
import time
from pathlib import Path

from dsv4_matrix.environment import SUITE, attest
from dsv4_matrix.gate import RunPlan, row_store, write_attestations, write_refusal
from dsv4_matrix.report.bits import BitsReport, CaseBits, Level, dumps
from dsv4_matrix.report.digest import digest
from dsv4_matrix.report.result import Header, Outcome, Report, Result

CASES = ("toy-a", "toy-b")


def numbers(case):
    return [((at * 2654435761 + len(case) + ord(case[-1])) % 2**32 - 2**31) * 2.0 ** -(at % 29) for at in range(640)]


def total(values, splits):
    width = -(-len(values) // splits)
    parts = []
    for first in range(0, len(values), width):
        part = 0.0
        for value in values[first : first + width]:
            part += value
        parts.append(part)
    return sum(parts, 0.0)


def value_of(case, plan, defect):
    values = numbers(case)
    if defect == "order-from-hash":
        values.sort(key=lambda value: hash(str(value)))
    batch = 1 if plan.composition == "alone" else 4
    return total(values, batch if defect == "splits-from-batch" else 1)


def beside(pid_file, second):
    """Run A never ends; run B crashes once A is there."""
    if not second:
        pid_file.write_text(str(os.getpid()))
        time.sleep(600)
    while not (pid_file.is_file() and pid_file.read_text()):
        time.sleep(0.01)
    sys.exit(3)


def main(report, defect):
    plan = RunPlan.observed(os.environ)
    second = plan.name == "B"
    if defect == "crash" and second:
        sys.exit(3)
    if defect == "bad-input":
        write_refusal(report, "there is no such backend")
        sys.exit(2)
    if defect == "crash-beside-a-hang":
        beside(report.with_name("A.pid"), second)
    results, bits = [], {}
    for case in reversed(CASES) if plan.reverse else CASES:
        outcome = Outcome.FAILED if defect == "wrong" and case == "toy-b" else Outcome.PASSED
        if defect == "lost" and second and case == "toy-b":
            outcome = Outcome.LOST
        results.append(
            Result(case, "r0/decode", "case", outcome, "" if outcome is Outcome.PASSED else "so it was told")
        )
        row = f"step-{1 if second and defect == 'other-steps' else 0}"
        value = value_of(case, plan, defect)
        if defect == "zero-sign":
            value = -0.0 if second else 0.0
        if defect == "nan":
            value = float("nan")
        if defect == "below-fp32" and second:
            value += abs(value) * 2.0**-50
        data = struct.pack("<d", value)
        shape = (1, 1) if defect == "shape" and second else (1,)
        bits[case] = CaseBits(Level.GRAPH, {("out", row): digest("out", "float64", shape, data)})
        row_store(report).put(case, "out", row, "float64", data)
    if defect == "empty":
        results, bits = [], {}
    if defect == "missing-case" and second:
        results, bits = results[:1], {results[0].id: bits[results[0].id]}
    torch = "2.14" if defect == "version" and second else "2.13"
    header = Header("m", "f", "toy", "toy", torch, "")
    written = dumps(BitsReport(Report(header, tuple(results)), bits))
    report.write_bytes(written[:-20] if defect == "truncated" and second else written)
    environ = dict(os.environ)
    if defect == "reused":
        environ["DSV4_MATRIX_GATE_RUN"] = "A-0123456789abcdef"
    if defect == "drift" and second:
        environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    workers = plan.workers if defect != "no-attestation" else 0
    write_attestations(report, [attest([SUITE], environ)] * workers, environ)
    if defect == "same-file" and second:
        while not report.with_name("A.attestations").is_file():
            time.sleep(0.01)  # run A goes on beside this one
        report.unlink()
        report.hardlink_to(report.with_name("A.jsonl"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
