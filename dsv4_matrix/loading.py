"""Finds a backend or a reference by the name of an entry point or as ``module:attr``, and checks it at once.

An explicit choice never falls back: it loads, or it is an error that says what is missing and what is installed.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar, cast

from dsv4_matrix.import_fault import ENDINGS, module_of_path, place, said
from dsv4_matrix.protocol import AttentionBackend, BackendFactory, MultiStepDraftBackend, Reference, RunnerConfig
from dsv4_matrix.report.fingerprint import ROOTS

BACKENDS = ROOTS["backends"]
REFERENCES = ROOTS["references"]
KERNELS = "dsv4_matrix.kernels"
#: folders of a checkout whose packages are imported by their own names, as pyproject.toml maps them
IMPORT_ROOTS = tuple(ROOTS)


Made = TypeVar("Made")


class LoadError(Exception):
    """A backend or reference that cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Backend:
    """A loaded backend: the name it was selected by, and a factory that checks what it makes."""

    name: str
    factory: BackendFactory

    @property
    def original(self) -> BackendFactory:
        """The factory as it was found, with whatever it declares about itself."""
        return self.factory.original if isinstance(self.factory, CheckedFactory) else self.factory


class CheckedFactory:
    """Makes backends by another factory, and names missing methods before a case runs into one."""

    def __init__(self, name: str, factory: BackendFactory) -> None:
        self._name = name
        self._factory = factory
        # Types that have been found to be complete: a run makes hundreds of backends, and signatures are slow to read.
        self._sound: set[tuple[type, type]] = set()

    @property
    def original(self) -> BackendFactory:
        """The factory behind this one."""
        return self._factory

    def __call__(self, runner: RunnerConfig) -> AttentionBackend:
        backend = self._made("its construction", lambda: self._factory(runner))
        self._check_type("the backend it makes", backend, AttentionBackend)
        return backend

    def multi_step(self, runner: RunnerConfig, *, num_steps: int, compress_ratio: int = 0) -> MultiStepDraftBackend:
        backend = self._made(
            "its multi_step",
            lambda: self._factory.multi_step(runner, num_steps=num_steps, compress_ratio=compress_ratio),
        )
        self._check_type("what its multi_step makes", backend, MultiStepDraftBackend)
        return backend

    def _made(self, what: str, make: Callable[[], Made]) -> Made:
        """What ``make`` returns. A SystemExit becomes an error like others: it must end this backend, not the run."""
        try:
            return make()
        except SystemExit as stop:
            raise LoadError(f"{self._name}: {what} does not return: {said(stop, Path.cwd())}") from stop

    def _check_type(self, what: str, made: object, protocol: type) -> None:
        if (type(made), protocol) not in self._sound:
            _check(self._name, what, made, protocol)
            self._sound.add((type(made), protocol))


def backend_name(selection: str | None = None) -> str:
    """The name of the backend that ``load_backend`` would load, without importing it. LoadError if there is none."""
    return _resolved(BACKENDS, "backend", "--matrix-backend", selection)[0]


def load_backend(selection: str | None = None, search: Path | None = None) -> Backend:
    """The backend that ``selection`` names; without one, the only one installed.

    Args:
        selection: name in the entry point group ``dsv4_matrix.backends``, or ``module:attr``.
        search: folder that ``module:attr`` may also import from, itself and its ``backends`` and ``references``; by
            default the current directory.

    Raises:
        LoadError: nothing by that name, an import that fails, missing methods, methods of another shape.
    """
    name, found = _find(BACKENDS, "backend", "--matrix-backend", selection, search)
    if not callable(found):
        raise LoadError(
            f"backend {name} is {_kind(found)}, which cannot be called; a backend factory is called with a "
            f"RunnerConfig and returns the backend, see AttentionBackend in dsv4_matrix.protocol"
        )
    if inspect.isclass(found):
        _check(name, "the class", found, AttentionBackend, also=("multi_step",))
    else:
        _check(name, "the factory", found, None, also=("multi_step",))
    return Backend(name, CheckedFactory(name, cast(BackendFactory, found)))


def load_reference(selection: str | None = None, search: Path | None = None) -> Reference:
    """The reference that ``selection`` names; without one, the only one installed. Raises like ``load_backend``."""
    name, found = _find(REFERENCES, "reference", "--matrix-reference", selection, search)
    _check(name, "the reference", found, Reference)
    return cast(Reference, found)


def load_kernel(selection: str | None = None, search: Path | None = None) -> tuple[str, Callable[..., Any]]:
    """The name and the FlashMLA-compatible function that ``selection`` names, for ``dsv4-matrix bench``.

    Only that it can be called is checked: it is FlashMLA's interface, which this project does not declare. Raises
    LoadError like ``load_backend``.
    """
    name, found = _find(KERNELS, "kernel", "--kernel", selection, search)
    if not callable(found):
        raise LoadError(f"kernel {name} is {_kind(found)}, which cannot be called")
    return name, cast(Callable[..., Any], found)


def installed(group: str) -> tuple[str, ...]:
    """Names in an entry point group, sorted."""
    return tuple(sorted({point.name for point in entry_points(group=group)}))


def _resolved(group: str, role: str, option: str, selection: str | None) -> tuple[str, EntryPoint | None]:
    """The name that ``selection`` stands for, and its entry point; None for ``module:attr``, which has none."""
    points = list(entry_points(group=group))
    here = _listing(role, points)
    if selection is None:
        if len({point.name for point in points}) != 1:
            raise LoadError(f"no {role} is selected; choose one with {option} NAME or {option} module:attr; {here}")
        selection = points[0].name
    if ":" in selection:
        return selection, None
    matching = {point.value: point for point in points if point.name == selection}
    if not matching:
        raise LoadError(f"there is no {role} {selection!r}; {here}; code that is not installed is given as module:attr")
    if len(matching) > 1:
        raise LoadError(f"{role} {selection!r} is ambiguous: {', '.join(sorted(matching))}; select it as module:attr")
    return selection, next(iter(matching.values()))


def _find(group: str, role: str, option: str, selection: str | None, search: Path | None) -> tuple[str, Any]:
    selection, point = _resolved(group, role, option, selection)
    if point is None:
        here = _listing(role, list(entry_points(group=group)))
        return selection, _from_module(role, selection, search or Path.cwd(), here)
    try:
        return selection, point.load()
    except ENDINGS as error:
        told = said(error, search or Path.cwd())
        raise LoadError(f"{role} {selection!r} ({point.value}) does not import: {told}") from error


def _from_module(role: str, selection: str, search: Path, here: str) -> Any:
    module_name, _, attribute = selection.partition(":")
    if not module_name or not attribute:
        raise LoadError(f"{role} {selection!r} is not of the form module:attr; {here}")
    if dotted := module_of_path(module_name, search, IMPORT_ROOTS):
        raise LoadError(
            f"{role} {selection!r}: {module_name} is a path, and code is given by the dotted name of its module: write "
            f"{dotted}:{attribute}, from the folder that has {dotted.partition('.')[0]} in it or with it in PYTHONPATH"
        )
    if str(search) not in sys.path:
        sys.path.insert(0, str(search))
    # last, so that they shadow nothing: a checkout of this project that is not installed
    sys.path += [str(search / root) for root in IMPORT_ROOTS if str(search / root) not in sys.path]
    try:
        found: Any = importlib.import_module(module_name)
    except ENDINGS as error:
        raise LoadError(f"{role} {selection!r}: {_unimported(module_name, error, search)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [name for name in vars(found) if not name.startswith("_")]
            raise LoadError(f"{role} {selection!r}: {module_name} has no {attribute}; it has {', '.join(public)}")
        found = getattr(found, part)
    return found


def _unimported(module: str, error: BaseException, search: Path) -> str:
    """Why ``module`` does not import: it was not found, or what it raised and where."""
    told = said(error, search)
    if not isinstance(error, ImportError):
        return f"module {module} does not import: {told}"
    if place(error, search):  # some of it ran, so that it is something else that is missing
        missing = f"; {module} itself was found, but not what it imports there: install that in this environment"
        return f"module {module} does not import: {told}{missing}"
    roots = ", ".join(f"{root}/" for root in IMPORT_ROOTS)
    return f"module {module} does not import (from {search}, {roots} in it and sys.path): {told}"


def _check(name: str, what: str, found: Any, protocol: type | None, also: Sequence[str] = ()) -> None:
    """LoadError naming every method of ``protocol`` that ``found`` lacks, or has with another shape."""
    wanted: dict[str, Any] = {} if protocol is None else _members(protocol)
    wanted.update({method: getattr(BackendFactory, method) for method in also})
    missing = [member for member in wanted if not hasattr(found, member)]
    wrong = [
        f"{member}{theirs}, called as {member}{ours}"
        for member, declared in wanted.items()
        if member not in missing and (ours := _signature(declared)) is not None
        if (theirs := _refusal(getattr(found, member), ours, inspect.isclass(found) and member not in also))
    ]
    if missing or wrong:
        faults = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"cannot be called as declared: {w}" for w in wrong]
        contract = protocol.__name__ if protocol else "BackendFactory"
        raise LoadError(f"{name}: {what} ({_kind(found)}) {'; '.join(faults)}. See {contract} in dsv4_matrix.protocol")


def _members(protocol: type) -> dict[str, Any]:
    return {name: value for name, value in vars(protocol).items() if not name.startswith("_")}


def _signature(declared: Any) -> inspect.Signature | None:
    """Of a Protocol method without self; None for a property."""
    if isinstance(declared, property):
        return None
    signature = inspect.signature(declared)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _refusal(method: Any, ours: inspect.Signature, unbound: bool) -> str:
    """The signature of ``method`` if a call as ``ours`` does not bind to it, else nothing."""
    try:
        theirs = inspect.signature(method)
    except (TypeError, ValueError):  # a builtin or an extension type keeps its signature to itself
        return ""
    positional = [p for p in ours.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    keywords = [p.name for p in ours.parameters.values() if p.kind is p.KEYWORD_ONLY]
    static = isinstance(method, staticmethod) or (inspect.ismethod(method) and method.__self__ is not None)
    arguments: Iterable[None] = [None] * (len(positional) + (unbound and not static))
    try:
        theirs.bind(*arguments, **dict.fromkeys(keywords))
    except TypeError:
        return str(theirs)
    return ""


def _listing(role: str, points: Sequence[EntryPoint]) -> str:
    names = sorted({f"{point.name} ({point.value})" for point in points})
    return f"installed {role}s: {', '.join(names) or 'none'}"


def _kind(found: Any) -> str:
    if inspect.isclass(found):
        return f"class {found.__module__}.{found.__qualname__}"
    if inspect.ismodule(found):
        return f"module {found.__name__}"
    if inspect.isroutine(found):
        return f"function {found.__module__}.{found.__qualname__}"
    return f"{type(found).__module__}.{type(found).__qualname__} object"
