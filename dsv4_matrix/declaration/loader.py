"""matrix.yaml as a ``Matrix``: reads the file by its layout, applies the rules, and reports every mistake together."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path

from dsv4_matrix.declaration.cells import CellReader, entries_of
from dsv4_matrix.declaration.grammar import BAD, Fields
from dsv4_matrix.declaration.layout import FILE
from dsv4_matrix.declaration.mistakes import DeclarationError, Mistake, Mistakes, quote
from dsv4_matrix.declaration.model import (
    Budget,
    Geometry,
    Matrix,
    Mode,
    Place,
    Tolerance,
    Tolerances,
)
from dsv4_matrix.declaration.source import MAX_BYTES, parse


def load_matrix(path: str | os.PathLike[str]) -> Matrix:
    """Read and check the declaration at ``path``.

    Raises:
        DeclarationError: with every mistake found, each with its place; also when the file cannot be read.
    """
    file = Path(path)
    shown = _shown(file)
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
            size = max(len(data), os.fstat(stream.fileno()).st_size)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _one(_given(file), f"no readable file ({reason})", "the path of a matrix.yaml") from None
    if len(data) > MAX_BYTES:
        raise _one(shown, f"a file of {size} bytes", f"at most {MAX_BYTES} bytes")
    return read_matrix(data, shown, str(file.resolve()))


@lru_cache(maxsize=4)  # a run in one process reads it twice, for itself and as the plugin; values are frozen
def read_matrix(data: bytes, shown: str, path: str = "") -> Matrix:
    """The declaration in ``data``; ``shown`` names it in places, ``path`` (else ``shown``) in ``Matrix.path``."""
    root = parse(data, shown)
    mistakes = Mistakes()
    fields = FILE.read(root, mistakes)
    if fields is BAD:
        mistakes.raise_any()
    matrix = _Reader(fields, mistakes).matrix(path or shown, hashlib.sha256(data).hexdigest())
    mistakes.raise_any()
    assert matrix is not None, "the reader gave up without naming a mistake"
    return matrix


def _one(shown: str, found: str, allowed: str) -> DeclarationError:
    return DeclarationError((Mistake(Place(shown, 1, 1), found, allowed),))


def _given(file: Path) -> str:
    """As it was given, for a file that is none: resolved, a folder could be told as the ``.`` that nobody wrote."""
    here = Path.cwd()
    return str(file.relative_to(here) if here in file.parents else file)


def _shown(file: Path) -> str:
    """Relative to the working directory if inside it: what an editor's terminal makes a link of."""
    try:
        return str(file.resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(file)


class _Reader:
    """From checked fields to values. Whatever holds a bad value is left out; it was reported when it was read."""

    def __init__(self, fields: Fields, mistakes: Mistakes) -> None:
        self.fields = fields
        self.mistakes = mistakes

    def matrix(self, path: str, sha256: str) -> Matrix | None:
        geometry = self.geometry()
        tolerances = self.tolerances()
        modes = self.modes()
        reader = CellReader(self.fields, self.mistakes)
        reader.check_profiles()
        cells, refusals = reader.cells(), reader.refusals()
        if self.mistakes.count or geometry is None or tolerances is None:
            return None
        ratios: tuple[int, ...] = self.fields.get("ratios")
        return Matrix(path, sha256, geometry, tolerances, ratios, modes, cells, refusals)

    def geometry(self) -> Geometry | None:
        fields = self.fields.get("geometry")
        if fields is BAD or not fields.sound:
            return None
        g = Geometry(**fields.values)
        if g.nope + g.rope != g.head_dim:
            found = f"head_dim {g.head_dim}, but nope {g.nope} + rope {g.rope} = {g.nope + g.rope}"
            self.mistakes.add(fields.place("head_dim"), found, "head_dim = nope + rope")
        if g.nope % 64:
            self.mistakes.add(fields.place("nope"), f"nope {g.nope}", "a multiple of 64, the quantisation group")
        # A scale byte for each group of 64, padded to a multiple of 8 (7 + 1 for the 448 of this model).
        scales = -(-(g.nope // 64) // 8) * 8
        want = g.nope + 2 * g.rope + scales
        if g.bytes_per_token != want:
            found = f"bytes_per_token {g.bytes_per_token}, but {g.nope} + 2 * {g.rope} + {scales} = {want}"
            self.mistakes.add(fields.place("bytes_per_token"), found, "nope + 2 * rope + padded scale bytes")
        return g

    def tolerances(self) -> Tolerances | None:
        fields = self.fields.get("tolerances")
        if fields is BAD or not fields.sound or not all(part.sound for part in fields.values.values()):
            return None
        return Tolerances(
            eager=Tolerance(**fields.get("eager").values),
            graph=Tolerance(**fields.get("graph").values),
            budget=Budget(**fields.get("budget").values),
        )

    def modes(self) -> tuple[Mode, ...]:
        entries = entries_of(self.fields.get("modes"))
        titles: dict[str, Place] = {}
        for name, fields in entries.values.items():
            title = fields.get("title") if fields is not BAD else BAD
            if title is not BAD and titles.setdefault(title, entries.places[name]) != entries.places[name]:
                self.mistakes.add(fields.place("title"), f"the title {quote(title)} a second time", "each title once")
        return tuple(
            Mode(name, **fields.values) for name, fields in entries.values.items() if fields is not BAD and fields.sound
        )
