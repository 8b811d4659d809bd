"""Generated blocks of README.md: found by markers, compared or replaced, the rest of the file left alone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from difflib import unified_diff
from itertools import pairwise
from pathlib import Path


class ReadmeError(Exception):
    """A README that cannot be read, written or has no unambiguous place for a block."""


def rendered(text: str, blocks: Mapping[str, str], path: str) -> str:
    """``text`` with every block of ``blocks`` between ``<!-- name:begin -->`` and ``<!-- name:end -->``.

    Blocks get the line ends that ``text`` has: git checks files out with CRLF on some machines, which is no drift.

    Raises:
        ReadmeError: a marker is missing, doubled, out of order, or inside another block.
    """
    spans = sorted((*_span(text, name, path), name) for name in blocks)
    newline = _newline(text)
    for (_, end, first), (begin, _, second) in pairwise(spans):
        if begin < end:
            raise ReadmeError(f"{path}: the block {second} begins inside the block {first}; put one after the other")
    pieces = []
    at = 0
    for begin, end, name in spans:
        pieces += [text[at:begin], f"\n{blocks[name].strip()}\n".replace("\n", newline)]
        at = end
    return "".join([*pieces, text[at:]])


def drift(path: Path, blocks: Mapping[str, str], command: str) -> str:
    """Empty if the file holds ``blocks``, else a unified diff and the ``command`` that mends it."""
    text = _read(path)
    want = rendered(text, blocks, str(path))
    if text == want:
        return ""
    names = (str(path), f"{path} (as declared)")
    diff = unified_diff(text.splitlines(), want.splitlines(), *names, lineterm="")
    return "\n".join([*diff, "", f"{path} is behind; bring it up to date with: {command}"])


def update(path: Path, blocks: Mapping[str, str]) -> bool:
    """Write ``blocks`` into the file, whole or not at all; whether anything changed."""
    text = _read(path)
    want = rendered(text, blocks, str(path))
    if text == want:
        return False
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="") as stream:
                stream.write(want)
            os.chmod(name, path.stat().st_mode & 0o777)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise ReadmeError(f"{path}: cannot be written ({error.strerror}); it is as it was") from None
    return True


def _read(path: Path) -> str:
    try:
        # Bytes and not text mode: line ends that the file has are kept outside the blocks.
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ReadmeError(f"{path}: cannot be read ({error.strerror}); name the file with --readme") from None
    except UnicodeDecodeError:
        raise ReadmeError(f"{path}: is not UTF-8 text") from None


def _newline(text: str) -> str:
    """CRLF if the first line ends so, else LF."""
    return "\r\n" if text.partition("\n")[0].endswith("\r") else "\n"


def _span(text: str, name: str, path: str) -> tuple[int, int]:
    """Offsets between the two markers of ``name``."""
    begin = _offset(text, f"<!-- {name}:begin -->", path)
    end = _offset(text, f"<!-- {name}:end -->", path)
    if end < begin:
        line = text.count("\n", 0, end) + 1
        raise ReadmeError(f"{path}:{line}: <!-- {name}:end --> stands before <!-- {name}:begin -->; swap the two")
    return begin + len(f"<!-- {name}:begin -->"), end


def _offset(text: str, marker: str, path: str) -> int:
    first = text.find(marker)
    if first < 0:
        raise ReadmeError(f"{path}: no {marker}; put it on a line of its own where the block belongs")
    second = text.find(marker, first + 1)
    if second >= 0:
        lines = [text.count("\n", 0, at) + 1 for at in (first, second)]
        raise ReadmeError(f"{path}:{lines[1]}: a second {marker} (first: line {lines[0]}); keep one of them")
    return first
