"""matrix.yaml as a ``Matrix``: reads the file by its layout, applies the rules, and reports every mistake together."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsv4_matrix.declaration.cost import static_cost
from dsv4_matrix.declaration.drives import DRIVES
from dsv4_matrix.declaration.grammar import BAD, Entries, Fields
from dsv4_matrix.declaration.layout import CELL_NAME, FILE
from dsv4_matrix.declaration.mistakes import DeclarationError, Mistake, Mistakes, join, quote
from dsv4_matrix.declaration.model import (
    Budget,
    Cell,
    Geometry,
    Matrix,
    Mode,
    Place,
    Probe,
    Refusal,
    State,
    Tolerance,
    Tolerances,
    Variant,
)
from dsv4_matrix.declaration.rules import check_variant
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
        raise _one(shown, f"no readable file ({reason})", "the path of a matrix.yaml") from None
    if len(data) > MAX_BYTES:
        raise _one(shown, f"a file of {size} bytes", f"at most {MAX_BYTES} bytes")
    return read_matrix(data, shown, str(file.resolve()))


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
        self.profiles: Mapping[str, Any] = _entries(fields.get("profiles")).values
        self.used: set[str] = set()
        self.reasons: dict[str, Place] = {}

    def matrix(self, path: str, sha256: str) -> Matrix | None:
        geometry = self.geometry()
        tolerances = self.tolerances()
        modes = self.modes()
        self.profile_names()
        cells = self.cells(tuple(mode.name for mode in modes))
        refusals = self.refusals()
        self.unused_profiles()
        if self.mistakes.count or geometry is None or tolerances is None:
            return None
        ratios: tuple[int, ...] = self.fields.get("ratios")
        matrix = Matrix(path, sha256, geometry, tolerances, ratios, modes, cells, refusals)
        self.ids(matrix)
        return matrix

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
        entries = _entries(self.fields.get("modes"))
        titles: dict[str, Place] = {}
        for name, fields in entries.values.items():
            title = fields.get("title") if fields is not BAD else BAD
            if title is not BAD and titles.setdefault(title, entries.places[name]) != entries.places[name]:
                self.mistakes.add(fields.place("title"), f"the title {quote(title)} a second time", "each title once")
        return tuple(
            Mode(name, **fields.values) for name, fields in entries.values.items() if fields is not BAD and fields.sound
        )

    def profile_names(self) -> None:
        for name, variants in self.profiles.items():
            if variants is not BAD:
                self.unique_names(variants, f"profile {name}")

    def unique_names(self, variants: tuple[Fields, ...], owner: str) -> None:
        seen: dict[str, Place] = {}
        for fields in variants:
            name = fields.get("name")
            place = fields.place("name")
            if name is not BAD and seen.setdefault(name, place) != place:
                first = seen[name]
                allowed = f"each name once (first: line {first.line}, column {first.column})"
                self.mistakes.add(place, f"variant {name} a second time in {owner}", allowed)

    def cells(self, modes: tuple[str, ...]) -> tuple[Cell, ...]:
        entries = _entries(self.fields.get("cells"))
        ratios = self.fields.get("ratios")
        if ratios is BAD or self.fields.get("modes") is BAD or self.fields.get("cells") is BAD:
            return ()
        known = _entries(self.fields.get("modes")).values
        expected = [f"r{ratio}/{mode}" for ratio in ratios for mode in known]
        missing = [name for name in expected if name not in entries.values]
        for name in missing:
            self.mistakes.add(self.fields.place("cells"), f"no cell {name}", "every ratio x mode once")
        cells = []
        for name, fields in entries.values.items():
            if name not in expected:
                allowed = f"r + one of {join(ratios)} + / + one of {join(known)}"
                self.mistakes.add(entries.places[name], f"the unknown cell {quote(name)}", allowed)
            elif fields is not BAD:
                ratio, mode = _split(name)
                cell = self.cell(ratio, mode, fields, entries.places[name])
                if cell is not None:
                    cells.append(cell)
        order = {name: index for index, name in enumerate(expected)}
        return tuple(sorted(cells, key=lambda cell: order[cell.id]))

    def cell(self, ratio: int, mode: str, fields: Fields, place: Place) -> Cell | None:
        state = fields.get("state")
        if state is BAD:
            return None
        name = f"r{ratio}/{mode}"
        covered = state == State.COVERED
        for key in ("reason", "probe") if covered else ("profiles", "variants"):
            if key in fields.values:
                allowed = "profiles and variants" if covered else "a reason and a probe"
                self.mistakes.add(fields.place(key), f"{key} in {name}, which is {state}", allowed)
        if covered:
            return Cell(ratio, mode, State.COVERED, variants=self.variants(ratio, mode, fields, place), place=place)
        for key, why in (("reason", "why it is not covered"), ("probe", "the refusal that its test asserts")):
            if key not in fields.values:
                self.mistakes.add(place, f"no {key} for {name}, which is {state}", f"{key}: {why}")
        self.own_reason(fields)
        probe = self.probe(fields.get("probe", BAD))
        reason = fields.get("reason", BAD)
        if probe is None or reason is BAD:
            return None
        return Cell(ratio, mode, State(state), reason=reason, probe=probe, place=place)

    def own_reason(self, fields: Fields) -> None:
        reason = fields.get("reason", BAD)
        if reason is BAD:
            return
        place = fields.place("reason")
        first = self.reasons.setdefault(reason, place)
        if first != place:
            allowed = f"a reason of its own (first: line {first.line})"
            self.mistakes.add(place, f"the reason {quote(reason)} a second time", allowed)

    def probe(self, fields: Any) -> Probe | None:
        if fields is BAD or not fields.sound:
            return None
        probe = Probe(**fields.values)
        try:
            re.compile(probe.match)
        except (re.error, OverflowError, RecursionError) as error:
            found = f"the invalid regular expression {quote(probe.match)} ({error})"
            self.mistakes.add(fields.place("match"), found, "a regular expression of Python's re")
        return probe

    def variants(self, ratio: int, mode: str, fields: Fields, place: Place) -> tuple[Variant, ...]:
        sources: list[Fields] = []
        profiles = fields.get("profiles", ())
        for index, name in enumerate(profiles if profiles is not BAD else ()):
            self.used.add(name)
            if name not in self.profiles:
                allowed = join(self.profiles) or "a name under profiles"
                self.mistakes.add(fields.place("profiles", index), f"the unknown profile {quote(name)}", allowed)
            elif self.profiles[name] is not BAD:
                sources += (_for_mode(variant, mode) for variant in self.profiles[name])
        own = fields.get("variants", ())
        sources += own if own is not BAD else ()
        if "profiles" not in fields.values and "variants" not in fields.values:
            self.mistakes.add(place, f"no variants for r{ratio}/{mode}, which is covered", "profiles or variants")
        self.unique_names(tuple(sources), f"r{ratio}/{mode}")
        variants = (self.variant(ratio, mode, source) for source in sources if source.sound)
        return tuple(variant for variant in variants if variant is not None)

    def variant(self, ratio: int, mode: str, fields: Fields) -> Variant | None:
        forwards = DRIVES[mode].forwards
        forward = fields.get("forward") or forwards[0]
        if "forward" not in fields.values and len(forwards) > 1:
            found = f"variant {fields.get('name')} without forward under {mode}"
            self.mistakes.add(fields.place(), found, f"forward: {join(forwards)}")
            return None
        if forward not in forwards:
            found = f"forward {forward} under {mode} in variant {fields.get('name')}"
            self.mistakes.add(fields.place("forward"), found, join(forwards))
            return None
        variant = Variant(**{**fields.values, "forward": forward}, place=fields.place())
        before = self.mistakes.count
        check_variant(ratio, mode, variant, fields, self.mistakes)
        if self.mistakes.count > before or "cost" in fields.values:
            return variant
        return replace(variant, cost=static_cost(ratio, mode, variant))

    def refusals(self) -> tuple[Refusal, ...]:
        found = []
        for name, fields in _entries(self.fields.get("refusals")).values.items():
            if fields is BAD:
                continue
            self.own_reason(fields)
            probe = self.probe(fields.get("probe", BAD))
            if probe is not None and fields.get("reason") is not BAD:
                found.append(Refusal(name, fields.get("reason"), probe))
        return tuple(found)

    def unused_profiles(self) -> None:
        places = _entries(self.fields.get("profiles")).places
        for name in self.profiles:
            if name not in self.used:
                self.mistakes.add(places[name], f"profile {name}, which no cell uses", "profiles that a cell names")

    def ids(self, matrix: Matrix) -> None:
        seen: dict[str, Cell | None] = {}
        for case in matrix.cases():
            if case.id in seen:
                place = (case.variant.place if case.variant else None) or self.fields.place("refusals")
                self.mistakes.add(place, f"the case id {case.id} a second time", "names that give each case its own id")
            seen[case.id] = case.cell


def _entries(value: Any) -> Entries:
    return value if isinstance(value, Entries) else Entries({}, {})


def _split(name: str) -> tuple[int, str]:
    assert re.fullmatch(CELL_NAME.pattern, name)
    ratio, _, mode = name[1:].partition("/")
    return int(ratio), mode


def _for_mode(fields: Fields, mode: str) -> Fields:
    """A profile serves eager and graph cells alike: where nothing is captured, its graph keys say nothing."""
    if DRIVES[mode].graph:
        return fields
    kept = {key: value for key, value in fields.values.items() if key not in ("replays", "bucket")}
    return Fields(fields.node, kept)
