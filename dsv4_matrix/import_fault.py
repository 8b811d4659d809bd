"""Tells a person why code of theirs did not import: what it raised and where, or that it was not found at all."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Collection
from pathlib import Path

#: What code of others may end in while it is imported or called. An interrupt is the user's and is not among them.
ENDINGS = (Exception, SystemExit)
_MACHINERY = Path(importlib.__file__).parent
_LOADING = Path(__file__).with_name("loading.py")


def said(error: BaseException, search: Path) -> str:
    """``RuntimeError: its words (mine.py:3)``; of a SystemExit that it was one; the place is ``place(error)``."""
    words = f"it ended in {error!r}" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
    where = place(error, search)
    return f"{words} ({where})" if where else words


def place(error: BaseException, search: Path) -> str:
    """``mine.py:3`` of the innermost frame in the user's code; empty if none of it ran, so that it was not found.

    The user's code is what was imported or called first, its folder, and ``search`` apart from what is installed in it.
    A path in ``search`` is told from there, any other by its last two parts.
    """
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    frames = [(path, line) for path, line in frames if not _of_machinery(path)]
    if not frames:
        return ""
    home = frames[0][0].parent
    path, line = [frame for frame in frames if home in frame[0].parents or _inside(frame[0], search)][-1]
    shown = path.relative_to(search) if search in path.parents else Path(*path.parts[-2:])
    return f"{shown.as_posix()}:{line}"


def _of_machinery(path: Path) -> bool:
    return path == _LOADING or path.name.startswith("<") or _MACHINERY in path.parents


def _inside(path: Path, search: Path) -> bool:
    return search in path.parents and "site-packages" not in path.relative_to(search).parts


def module_of_path(written: str, search: Path, roots: Collection[str] = ()) -> str | None:
    """The dotted name to write instead of ``written``, if that is a path such as ``./mine.py``; else None.

    Args:
        written: as in ``module:attr``.
        search: folder that it is relative to.
        roots: folders in it whose modules are imported by their own names.
    """
    if "/" not in written and not written.endswith(".py"):
        return None
    path = Path(written.removesuffix(".py"))
    if search in path.parents:
        path = path.relative_to(search)
    parts = path.parts[:-1] if path.name == "__init__" else path.parts
    if path.is_absolute() or ".." in parts:
        parts = parts[-1:]
    return ".".join(parts[1:] if len(parts) > 1 and parts[0] in roots else parts)
