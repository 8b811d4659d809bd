"""Which kernel of a backend serves which call: as it declares for all devices, and as it says of the one at hand.

Both are optional. ``kernels.json`` in the backend's import package is the declaration, read without importing anything,
for ``explain``. ``kernel_paths(device)`` of the factory is asked when cases run; its answer stands in the report's
header, so that a report made with another choice is another report.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dsv4_matrix.report.fingerprint import ROOTS

METHOD = "kernel_paths"
TABLE = "kernels.json"
#: What separates names in the header, and so may not be in one.
_SEPARATORS = (",", ";", ":", "\n")


class KernelsError(ValueError):
    """A declaration of kernels that cannot be read; the message names the place and what is expected."""


@dataclass(frozen=True)
class ServedCall:
    """What serves one kind of call on one device.

    Attributes:
        call: ``attention``, or a part of such calls, ``attention/64`` of 64 heads.
        kernel: ``portable``.
        why: one sentence.
    """

    call: str
    kernel: str
    why: str


@dataclass(frozen=True)
class DeclaredKernel:
    """One line of ``kernels.json``. Of the lines for a call and an architecture, the first that fits serves.

    Attributes:
        call, kernel: as in ``ServedCall``.
        architectures: of devices, in the backend's own names.
        setting: what the user has to set for it, ``NAME=value``; empty where nothing.
        when: which of the calls it takes, in words; empty for all.
    """

    call: str
    kernel: str
    architectures: tuple[str, ...]
    setting: str
    when: str


def kernel_paths(factory: Any, device: str) -> tuple[ServedCall, ...]:
    """What ``factory`` says of ``device`` (a torch device string); () if it says nothing. KernelsError for nonsense."""
    ask = getattr(factory, METHOD, None)
    if ask is None:
        return ()
    try:
        found = ask(device)
    except (Exception, SystemExit) as error:
        raise KernelsError(f"{METHOD}({device!r}) raised {type(error).__name__}: {error}") from error
    if isinstance(found, str | bytes | Mapping) or not isinstance(found, Iterable):
        raise KernelsError(f"{METHOD}({device!r}) must return a list of mappings, got {type(found).__name__}")
    paths = tuple(_served(entry, f"{METHOD}({device!r})[{number}]") for number, entry in enumerate(found))
    calls = [path.call for path in paths]
    if twice := sorted({call for call in calls if calls.count(call) > 1}):
        raise KernelsError(f"{METHOD}({device!r}) names {', '.join(twice)} twice; one kernel serves a call")
    return paths


def header_text(paths: Sequence[ServedCall]) -> str:
    """``hopper: attention/64, attention/128; portable: attention/16``, as first mentioned; empty for none."""
    return "; ".join(f"{kernel}: {', '.join(calls)}" for kernel, calls in _by_kernel(paths).items())


def reasons_text(paths: Sequence[ServedCall]) -> list[str]:
    """One line for each kernel and reason: ``portable serves attention/16, attention/32: why``."""
    served: dict[tuple[str, str], list[str]] = {}
    for path in paths:
        served.setdefault((path.kernel, path.why), []).append(path.call)
    return [f"{kernel} serves {', '.join(calls)}: {why}" for (kernel, why), calls in served.items()]


def declared_kernels(backend: str) -> tuple[DeclaredKernel, ...]:
    """The table of ``backend``, an entry point's name or ``module:attr``; () if it has none or is not found.

    Nothing of the backend is imported. KernelsError for a table that is not as it should be.
    """
    module = backend.partition(":")[0]
    if ":" not in backend:
        modules = {point.module for point in entry_points(group=ROOTS["backends"]) if point.name == backend}
        if len(modules) != 1:
            return ()
        module = modules.pop()
    path = _beside(module)
    return () if path is None else read_table(path)


def installed_tables() -> dict[str, tuple[DeclaredKernel, ...]]:
    """The tables of all installed backends that have one, by name."""
    names = sorted({point.name for point in entry_points(group=ROOTS["backends"])})
    return {name: table for name in names if (table := declared_kernels(name))}


def read_table(path: Path) -> tuple[DeclaredKernel, ...]:
    """The table in the file ``path``. KernelsError, naming file and entry, for anything that is none."""
    try:
        entries = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise KernelsError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(entries, list):
        raise KernelsError(f"{path}: must be a list, got {type(entries).__name__}")
    return tuple(_declared(entry, f"{path}[{number}]") for number, entry in enumerate(entries))


def table_text(table: Sequence[DeclaredKernel]) -> list[str]:
    """One line for each entry, for people: ``attention: hopper on sm90 with NAME=value (64 or 128 heads)``."""
    lines, seen = [], set()
    for entry in table:
        setting = f" with {entry.setting}" if entry.setting else ""
        when = f" ({entry.when})" if entry.when else " (all others)" if entry.call in seen else ""
        lines.append(f"{entry.call}: {entry.kernel} on {', '.join(entry.architectures)}{setting}{when}")
        seen.add(entry.call)
    return lines


def _by_kernel(paths: Sequence[ServedCall]) -> dict[str, list[str]]:
    served: dict[str, list[str]] = {}
    for path in paths:
        served.setdefault(path.kernel, []).append(path.call)
    return served


def _beside(module: str) -> Path | None:
    """The table in the top-level package of ``module``, found without running any of its code."""
    try:
        spec = find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.origin).with_name(TABLE)
    return path if path.is_file() else None


def _served(entry: Any, place: str) -> ServedCall:
    values = _texts(entry, place, [field.name for field in fields(ServedCall)])
    if not values["why"].strip():
        raise KernelsError(f"{place}: why is empty; say in a sentence why this kernel serves the call")
    return ServedCall(**values)


def _declared(entry: Any, place: str) -> DeclaredKernel:
    architectures = entry.get("architectures") if isinstance(entry, Mapping) else None
    names = [field.name for field in fields(DeclaredKernel) if field.name != "architectures"]
    rest = {key: value for key, value in entry.items() if key != "architectures"} if architectures else entry
    values = _texts(rest, place, names)
    if not isinstance(architectures, list) or not all(isinstance(name, str) and name for name in architectures):
        raise KernelsError(f"{place}: architectures must be a list of names, got {architectures!r}")
    return DeclaredKernel(architectures=tuple(architectures), **values)


def _texts(entry: Any, place: str, names: Sequence[str]) -> dict[str, str]:
    if not isinstance(entry, Mapping) or set(entry) != set(names):
        found = sorted(map(str, entry)) if isinstance(entry, Mapping) else type(entry).__name__
        raise KernelsError(f"{place}: expected a mapping with {', '.join(names)}, got {found}")
    for name in names:
        if not isinstance(entry[name], str) or "\n" in entry[name]:
            raise KernelsError(f"{place}: {name} must be text on one line, got {entry[name]!r}")
    for name in ("call", "kernel"):
        if not entry[name].strip() or any(separator in entry[name] for separator in _SEPARATORS):
            raise KernelsError(f"{place}: {name} must be a name without comma, colon or semicolon, got {entry[name]!r}")
    return {name: entry[name] for name in names}
