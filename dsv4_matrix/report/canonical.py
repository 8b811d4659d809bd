"""The canonical report file: the same bytes for the same results, whatever order or number of workers made them.

JSON Lines in UTF-8: a header, then one object a result sorted by the bytes of its id; keys sorted, separators ``,`` and
``:``, ASCII escapes, no NaN, LF, a final newline. Times, hosts and workers are not in it (see ``telemetry``).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from dsv4_matrix.report.result import SCHEMA, Header, Outcome, Report, Result

#: Keys of the header that are not written while they are empty: reports without them are older, or of a backend that
#: does not tell.
OPTIONAL_HEADER_KEYS = frozenset({"kernels"})
#: Keys that later schemas fill. A reader accepts and drops them; any other unknown key is an error.
RESERVED_HEADER_KEYS = frozenset({"environment"})
RESERVED_RESULT_KEYS = frozenset({"digests", "promises"})

KINDS = ("case", "probe", "refusal")


class ReportError(ValueError):
    """A report file that cannot be read or written as it is; the message names file and line."""


def encode(value: Mapping[str, Any]) -> str:
    """One canonical line, without its newline. ValueError for NaN and infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def dumps(report: Report) -> bytes:
    """The bytes of ``report``. ReportError if an id occurs twice."""
    ordered = sorted(report.results, key=lambda result: result.id.encode())
    for before, after in pairwise(ordered):
        if before.id == after.id:
            raise ReportError(f"case {after.id} has two results; a report holds one result a case")
    header = {key: value for key, value in asdict(report.header).items() if value or key not in OPTIONAL_HEADER_KEYS}
    lines = [encode({"schema": SCHEMA, **header})]
    lines += [encode({**asdict(result), "outcome": result.outcome.value}) for result in ordered]
    return ("\n".join(lines) + "\n").encode("ascii")


def loads(data: bytes, path: str = "report") -> Report:
    """The report in ``data``. ReportError, with ``path:line``, for anything that ``dumps`` could not have made."""
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError as error:
        raise ReportError(f"{path}: not ASCII at byte {error.start}; a canonical report escapes other text") from None
    if not text.endswith("\n"):
        raise ReportError(f"{path}: the last line has no newline; the file is truncated")
    lines = text[:-1].split("\n")
    header = _header(lines[0], f"{path}:1")
    results = [_result(line, f"{path}:{number}") for number, line in enumerate(lines[1:], start=2)]
    for number, (before, after) in enumerate(pairwise(results), start=3):
        if before.id == after.id:
            raise ReportError(f"{path}:{number}: case {after.id} occurs twice")
        if before.id.encode() > after.id.encode():
            raise ReportError(f"{path}:{number}: case {after.id} stands after {before.id}; lines are sorted by id")
    return Report(header, tuple(results))


def read(path: Path) -> Report:
    """The report in file ``path``; ReportError if it cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ReportError(f"{path}: cannot read the report: {error.strerror}") from None
    return loads(data, str(path))


def write(report: Report, path: Path) -> None:
    """Write ``report`` to ``path`` in one step: a file that was there stays whole if this fails. ReportError."""
    write_in_one_step(dumps(report), path)


def write_in_one_step(data: bytes, path: Path) -> None:
    """Replace ``path`` by ``data`` through a temporary file beside it. ReportError if that cannot be done."""
    name = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            name = file.name
            file.write(data)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        if name is not None:
            Path(name).unlink(missing_ok=True)
        raise ReportError(f"{path}: cannot write the report: {error.strerror}") from None


def check_writable(path: Path) -> None:
    """ReportError, with what to do, unless ``write`` to ``path`` would work now. Leaves nothing behind."""
    if path.is_dir():
        raise ReportError(f"{path}: is a directory; name a file in it, such as {path / 'report.jsonl'}")
    if not path.parent.is_dir():
        raise ReportError(f"{path}: there is no directory {path.parent}; create it first")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise ReportError(f"{path}: cannot write to {path.parent}: {error.strerror}") from None


def _object(
    line: str,
    place: str,
    expected: frozenset[str],
    reserved: frozenset[str],
    optional: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    try:
        value = json.loads(line, object_pairs_hook=lambda pairs: _unique(pairs, place), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ReportError(
            f"{place}: not JSON: {error.msg} at column {error.colno}; expected JSON Lines as "
            "'dsv4-matrix run --report' writes them"
        ) from None
    except (ValueError, RecursionError) as error:
        # Python refuses integers of thousands of digits, NaN (``_refuse_constant``) and nesting beyond its stack.
        if isinstance(error, ReportError):
            raise
        raise ReportError(f"{place}: not a line of a report: {error}") from None
    if not isinstance(value, dict):
        raise ReportError(f"{place}: expected an object, got {type(value).__name__}")
    if missing := sorted(expected - value.keys()):
        raise ReportError(f"{place}: missing {', '.join(missing)}")
    if unknown := sorted(value.keys() - expected - optional - reserved):
        allowed = ", ".join(sorted(expected | optional))
        raise ReportError(f"{place}: unknown {', '.join(unknown)}; allowed are {allowed}")
    if empty := sorted(key for key in optional if value.get(key) == ""):
        raise ReportError(f"{place}: {', '.join(empty)} is empty, and then not written")
    if encode(value) != line:
        raise ReportError(f"{place}: not in canonical form; reports are written by dsv4-matrix and not edited")
    return {key: value[key] for key in expected | (optional & value.keys())}


def _unique(pairs: list[tuple[str, Any]], place: str) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ReportError(f"{place}: a key occurs twice")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _typed(value: dict[str, Any], place: str, integers: frozenset[str] = frozenset()) -> None:
    for key, item in value.items():
        wanted = int if key in integers else str
        if type(item) is not wanted:
            raise ReportError(f"{place}: {key} must be {wanted.__name__}, got {item!r}")


def _header(line: str, place: str) -> Header:
    expected = frozenset({"schema", *(f.name for f in fields(Header))}) - OPTIONAL_HEADER_KEYS
    value = _object(line, place, expected, RESERVED_HEADER_KEYS, OPTIONAL_HEADER_KEYS)
    _typed(value, place)
    if (schema := value.pop("schema")) != SCHEMA:
        raise ReportError(f"{place}: schema {schema} is not {SCHEMA}; read it with the version that wrote it")
    return Header(**value)


def _result(line: str, place: str) -> Result:
    value = _object(line, place, frozenset(f.name for f in fields(Result)), RESERVED_RESULT_KEYS)
    _typed(value, place, frozenset({"captures", "replays"}))
    for key, allowed in (("outcome", [o.value for o in Outcome]), ("kind", list(KINDS))):
        if value[key] not in allowed:
            raise ReportError(f"{place}: {key} {value[key]!r} is none of {', '.join(allowed)}")
    if value["captures"] < 0 or value["replays"] < 0:
        raise ReportError(f"{place}: captures and replays are counts, got {value['captures']} and {value['replays']}")
    try:
        margin = float(value["margin"] or "0")
    except ValueError:
        raise ReportError(f"{place}: margin {value['margin']!r} is not a number") from None
    if margin < 0 or (value["outcome"] == Outcome.PASSED and not margin <= 1):
        raise ReportError(f"{place}: margin {value['margin']} does not go with outcome {value['outcome']}")
    return Result(**{**value, "outcome": Outcome(value["outcome"])})
