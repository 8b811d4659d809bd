"""What the two-run gate found on a device, kept beside its report: the verdict, what it covered, and of which sources.

One file a device, ``nvidia-h200.gate.json``. It goes out of date with what the matrix goes out of date with, and also
with the sources of the gate: a verdict of another comparison is none of this one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from dsv4_matrix.declaration.model import Level, Matrix
from dsv4_matrix.report.canonical import ReportError, write_in_one_step
from dsv4_matrix.report.fingerprint import fingerprint
from dsv4_matrix.report.result import Header

SCHEMA = "dsv4-matrix-gate/1"
SUFFIX = ".gate.json"
#: Parts of the harness that decide a verdict, beside those that decide a result.
SOURCES = (
    "gate",
    "gate_command",
    "composition.py",
    "environment",
    "admission.py",
    "report/bits.py",
    "report/digest.py",
)


@dataclass(frozen=True)
class GateEvidence:
    """One gate over the whole matrix.

    Attributes:
        header: of both runs' reports; its fingerprint is of the sources that decide a result.
        gate_sources: fingerprint of these and of the gate's.
        environment: sha256 of what every worker attested and must match.
        device, driver: out of that, in words.
        level: what the runs differed in.
        cases: cases that were compared.
        rows: rows that were compared.
        differ: how many of them differ.
        missing: rows that one run alone has.
        short: cases that did not pass, or too few rows.
        uncaught: canaries that were not noticed.
    """

    header: Header
    gate_sources: str
    environment: str
    device: str
    driver: str
    level: Level
    cases: int
    rows: int
    differ: int = 0
    missing: int = 0
    short: int = 0
    uncaught: int = 0

    @property
    def aligned(self) -> bool:
        return self.rows > 0 and not (self.differ or self.missing or self.short or self.uncaught)

    def __str__(self) -> str:
        if self.aligned:
            return "aligned"
        counts = (
            (self.differ, "rows differ"),
            (self.missing, "rows missing in a run"),
            (self.short, "cases fell short"),
            (self.uncaught, "canaries not caught"),
        )
        return f"NOT aligned: {', '.join(f'{n} {what}' for n, what in counts if n) or 'nothing compared'}"


def write(evidence: GateEvidence, path: Path) -> None:
    """Replace ``path`` in one step. ReportError if that cannot be done."""
    value = {"schema": SCHEMA, **asdict(evidence)}
    write_in_one_step(f"{json.dumps(value, indent=1, sort_keys=True)}\n".encode("ascii"), path)


def read(path: Path) -> GateEvidence:
    """The evidence in ``path``; ReportError, naming it, for anything that ``write`` does not write."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ReportError(f"{path}: cannot read the gate's evidence: {error.strerror}") from None
    except ValueError as error:
        raise ReportError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict) or value.pop("schema", None) != SCHEMA:
        raise ReportError(f"{path}: is not of schema {SCHEMA}; 'dsv4-matrix gate --record' writes it")
    try:
        found = GateEvidence(**{**value, "header": Header(**value["header"]), "level": Level(value["level"])})
    except (TypeError, ValueError, KeyError) as error:
        raise ReportError(f"{path}: not the gate's evidence: {error}") from None
    _check_types(asdict(found), path)
    return found


def gate_fingerprint(matrix: Path) -> str:
    """Of all sources that decide a verdict, here."""
    return fingerprint(matrix, also=SOURCES)


def gate_markdown(matrix: Matrix, folder: Path, devices: Sequence[str]) -> str:
    """A table of what the gate found on each device, the given ones without evidence too. ReportError as ``read``."""
    here = gate_fingerprint(Path(matrix.path))
    found = {e.header.device_model: e for e in map(read, sorted(folder.glob(f"*{SUFFIX}")))}
    rows = [_row(name, found.get(name), matrix, here) for name in sorted({*devices, *found})]
    heads = ["device", "level", "two-run gate", "compared", "torch, triton, driver", "sources"]
    return tabulate(rows, headers=heads, tablefmt="github", disable_numparse=True)


def currency(evidence: GateEvidence, matrix: Matrix, here: str) -> str:
    """``current``, or why the verdict says nothing about the sources with ``gate_fingerprint`` ``here``."""
    if evidence.header.matrix_sha256 != matrix.sha256:
        return "not current: recorded with another matrix.yaml"
    return "current" if evidence.gate_sources == here else "not current: recorded on other sources"


def _row(device: str, evidence: GateEvidence | None, matrix: Matrix, here: str) -> list[str]:
    if evidence is None:
        return [device, "", "not recorded", "", "", ""]
    header = evidence.header
    return [
        device,
        evidence.level.value,
        str(evidence),
        f"{evidence.rows} rows of {evidence.cases} cases",
        f"{header.torch}, {header.triton or 'none'}, {evidence.driver}",
        currency(evidence, matrix, here),
    ]


def _check_types(value: Mapping[str, Any], path: Path) -> None:
    of_header = {f"header.{name}": item for name, item in value["header"].items()}
    for name, item in {**value, **of_header}.items():
        if name == "header":
            continue
        wanted = int if name in ("cases", "rows", "differ", "missing", "short", "uncaught") else str
        if not isinstance(item, wanted) or isinstance(item, bool):
            raise ReportError(f"{path}: {name} must be {wanted.__name__}, got {item!r}")
        if isinstance(item, int) and item < 0:
            raise ReportError(f"{path}: {name} must not be negative, got {item}")
