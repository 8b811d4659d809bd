"""The result of one case, and the header that says what was run, as frozen values."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum

SCHEMA = "dsv4-matrix-report/1"


class Outcome(StrEnum):
    """How a case ended. Only ``PASSED`` counts as proof; nothing passes by being skipped."""

    PASSED = "passed"
    FAILED = "failed"
    INSENSITIVE = "insensitive"  # the case agrees, but could not have noticed a defect that it claims to see
    ERROR = "error"  # the backend, or the harness, raised something that the case did not ask for
    TIMEOUT = "timeout"
    LOST = "lost"  # planned, but no result came back: the worker died
    NOT_RUN = "not-run"


@dataclass(frozen=True)
class Result:
    """One line of the report.

    Attributes:
        id: case id.
        cell: ``r4/cg-decode``; empty for a refusal outside the cells.
        kind: ``case``, ``probe`` or ``refusal``.
        outcome: see ``Outcome``.
        reason: why it did not pass; empty for a pass. Free of times, hosts, paths and addresses.
        margin: worst error over budget as ``format_margin`` writes it; empty where nothing was measured.
        captures: graphs captured.
        replays: graph replays compared.
    """

    id: str
    cell: str
    kind: str
    outcome: Outcome
    reason: str = ""
    margin: str = ""
    captures: int = 0
    replays: int = 0


@dataclass(frozen=True)
class Header:
    """First line of the report. Two reports merge only if their headers are equal, so no host, time or worker count.

    Attributes:
        matrix_sha256: of the bytes of matrix.yaml.
        fingerprint: of the sources that decide a result, see ``dsv4_matrix.report.fingerprint``.
        backend: as it was selected, an entry point's name or ``module:attr``.
        device_model: ``NVIDIA H200``, or ``CPU interpreter``.
        torch: version string.
        triton: version string; empty where triton is not installed.
        kernels: which kernel of the backend served which call, ``hopper: attention; portable: sparse-prefill``; empty
            where the backend does not tell, and then not written, so that older reports read as they are.
    """

    matrix_sha256: str
    fingerprint: str
    backend: str
    device_model: str
    torch: str
    triton: str
    kernels: str = ""


@dataclass(frozen=True)
class Report:
    """A header and its results, sorted by the bytes of the id."""

    header: Header
    results: tuple[Result, ...]


def format_margin(margin: float) -> str:
    """Error over budget with two significant digits: ``0.60``, ``12``, ``1.2e+03``, ``inf``, ``nan``."""
    if not math.isfinite(margin):
        return str(float(margin))
    return f"{margin:#.2g}".rstrip(".")


_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")
_PATH = re.compile(r"(?<![\w.])(?:/[\w.+@~-]+){2,}")


#: torch tells, after what it could not allocate, how much every process holds at that moment.
_MEMORY = re.compile(r"(CUDA out of memory\. Tried to allocate [^.]*\.?[^.]*)\. GPU \d.*", re.DOTALL)


def without_machine(text: str) -> str:
    """``text`` with addresses, folders of absolute paths and memory in use taken out: the same on every machine."""
    text = _MEMORY.sub(r"\1", text)
    text = _ADDRESS.sub("0x…", text)
    return _PATH.sub(lambda found: "…/" + found.group().rsplit("/", 1)[1], text)
