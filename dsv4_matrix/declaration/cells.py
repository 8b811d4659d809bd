"""Cells, their variants and probes, and refusals: the part of the file that becomes generated tests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dsv4_matrix.declaration.cost import static_cost
from dsv4_matrix.declaration.drives import DRIVES
from dsv4_matrix.declaration.grammar import BAD, Entries, Fields
from dsv4_matrix.declaration.mistakes import Mistakes, join, quote
from dsv4_matrix.declaration.model import Cell, Level, Place, PrefillBits, Probe, Refusal, State, Variant
from dsv4_matrix.declaration.patterns import fault_of
from dsv4_matrix.declaration.rules import check_driver, check_site, check_site_outside_cells, check_variant


class CellReader:
    """From the checked fields of the file to cells and refusals, mistakes between keys added on the way.

    Whatever holds a bad value is left out; it was reported when it was read.
    """

    def __init__(self, fields: Fields, mistakes: Mistakes) -> None:
        self.fields = fields
        self.mistakes = mistakes
        self.profiles: Mapping[str, Any] = entries_of(fields.get("profiles")).values
        self.reasons: dict[str, Place] = {}

    def check_profiles(self) -> None:
        for name, variants in self.profiles.items():
            if variants is not BAD:
                self.unique_names(variants, f"profile {name}")
        places = entries_of(self.fields.get("profiles")).places
        used: set[str] = set()
        for cell in entries_of(self.fields.get("cells")).values.values():
            names = cell.get("profiles", ()) if cell is not BAD else ()
            used.update(self.profiles if names is BAD else names)
        for name in self.profiles:
            if name not in used:
                self.mistakes.add(places[name], f"profile {name}, which no cell uses", "profiles that a cell names")

    def unique_names(self, variants: tuple[Fields, ...], owner: str) -> None:
        seen: dict[str, Place] = {}
        for fields in variants:
            name = fields.get("name")
            place = fields.place("name")
            if name is not BAD and seen.setdefault(name, place) != place:
                first = seen[name]
                allowed = f"each name once (first: line {first.line}, column {first.column})"
                self.mistakes.add(place, f"variant {name} a second time in {owner}", allowed)

    def cells(self) -> tuple[Cell, ...]:
        entries = entries_of(self.fields.get("cells"))
        ratios = self.fields.get("ratios")
        if ratios is BAD or self.fields.get("modes") is BAD or self.fields.get("cells") is BAD:
            return ()
        known = entries_of(self.fields.get("modes")).values
        expected = {f"r{ratio}/{mode}": (ratio, mode) for ratio in ratios for mode in known}
        missing = [name for name in expected if name not in entries.values]
        for name in missing:
            self.mistakes.add(self.fields.place("cells"), f"no cell {name}", "every ratio x mode once")
        cells = []
        for name, fields in entries.values.items():
            if name not in expected:
                allowed = f"r + one of {join(ratios)} + / + one of {join(known)}"
                self.mistakes.add(entries.places[name], f"the unknown cell {quote(name)}", allowed)
            elif fields is not BAD:
                cell = self.cell(*expected[name], fields, entries.places[name])
                if cell is not None:
                    cells.append(cell)
        order = list(expected)
        return tuple(sorted(cells, key=lambda cell: order.index(cell.id)))

    def cell(self, ratio: int, mode: str, fields: Fields, place: Place) -> Cell | None:
        state = fields.get("state")
        if state is BAD:
            return None
        name = f"r{ratio}/{mode}"
        covered = state == State.COVERED
        for key in ("reason", "probe") if covered else ("profiles", "variants", "promise", "prefill_decode_bitwise"):
            if key in fields.values:
                allowed = "profiles and variants" if covered else "a reason and a probe"
                self.mistakes.add(fields.place(key), f"{key} in {name}, which is {state}", allowed)
        if covered:
            check_driver(ratio, mode, fields, self.mistakes)
            promise = fields.get("promise", Level.SAME_PLAN)
            return Cell(
                ratio,
                mode,
                State.COVERED,
                variants=self.variants(ratio, mode, fields, place),
                promise=Level.SAME_PLAN if promise is BAD else Level(promise),
                prefill_bits=self.prefill_bits(mode, fields),
                place=place,
            )
        for key, why in (("reason", "why it is not covered"), ("probe", "the refusal that its test asserts")):
            if key not in fields.values:
                self.mistakes.add(place, f"no {key} for {name}, which is {state}", f"{key}: {why}")
        self.own_reason(fields)
        probe = self.probe(fields.get("probe", BAD))
        reason = fields.get("reason", BAD)
        if probe is not None:
            check_site(ratio, mode, probe.site, fields.get("probe"), self.mistakes)
        if probe is None or reason is BAD:
            return None
        return Cell(ratio, mode, State(state), reason=reason, probe=probe, place=place)

    def prefill_bits(self, mode: str, fields: Fields) -> tuple[PrefillBits, ...]:
        paths = fields.get("prefill_decode_bitwise")
        if paths is None or paths is BAD:
            return ()
        if "extend" not in DRIVES[mode].forwards:
            found = f"prefill_decode_bitwise under {mode}, which runs no extend"
            self.mistakes.add(fields.place("prefill_decode_bitwise"), found, "only in modes that extend")
        found_bits = []
        for path, agreement in paths.values.items():
            if agreement is BAD or not agreement.sound:
                continue
            bitwise, first = agreement.get("bitwise"), agreement.get("first_divergent_kv_len", 0)
            if (bitwise is False) != bool(first):
                found = f"bitwise {'unknown' if bitwise is None else str(bitwise).lower()} for path {path}" + (
                    " with a first_divergent_kv_len" if first else " without first_divergent_kv_len"
                )
                allowed = "first_divergent_kv_len beside bitwise: false, and nowhere else"
                self.mistakes.add(agreement.place("first_divergent_kv_len"), found, allowed)
            found_bits.append(PrefillBits(path, bitwise, first))
        return tuple(found_bits)

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
            fault = fault_of(probe.match)
        except (re.error, OverflowError, RecursionError) as error:
            found = f"the invalid regular expression {quote(probe.match)} ({error})"
            self.mistakes.add(fields.place("match"), found, "a regular expression of Python's re")
            return probe
        if fault is not None:
            found, allowed = fault
            found = f"the regular expression {quote(probe.match)}, which {found}"
            self.mistakes.add(fields.place("match"), found, allowed)
        return probe

    def variants(self, ratio: int, mode: str, fields: Fields, place: Place) -> tuple[Variant, ...]:
        sources: list[Fields] = []
        profiles = fields.get("profiles", ())
        for index, name in enumerate(profiles if profiles is not BAD else ()):
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
        variants = [self.variant(ratio, mode, source) for source in sources if source.sound]
        made = tuple(variant for variant in variants if variant is not None)
        self.unique_inputs(mode, made)
        return made

    def unique_inputs(self, mode: str, variants: tuple[Variant, ...]) -> None:
        """Add a mistake for every variant that runs what another of its cell runs: it would count twice."""
        seen: dict[Variant, Variant] = {}
        for variant in variants:
            first = seen.setdefault(inputs_of(variant), variant)
            if first.name != variant.name and first.place is not None and variant.place is not None:
                found = f"variant {variant.name} with all inputs of {first.name} under {mode}"
                allowed = f"inputs of its own (first: line {first.place.line}, column {first.place.column})"
                self.mistakes.add(variant.place, found, allowed)

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
        for name, fields in entries_of(self.fields.get("refusals")).values.items():
            if fields is BAD:
                continue
            self.own_reason(fields)
            probe = self.probe(fields.get("probe", BAD))
            if probe is not None:
                check_site_outside_cells(probe.site, fields.get("probe"), self.mistakes)
            if probe is not None and fields.get("reason") is not BAD:
                found.append(Refusal(name, fields.get("reason"), probe))
        return tuple(found)


def entries_of(value: Any) -> Entries:
    """``value`` as a table; an empty one where the key is absent or was bad."""
    return value if isinstance(value, Entries) else Entries({}, {})


def inputs_of(variant: Variant) -> Variant:
    """``variant`` without its name and what does not change a step: equal for variants that run the same.

    Devices are left out: what runs on both is one variant. A bucket counts as large as the graph will be.
    """
    largest = max(len(batch) for batch in (variant.prefix_lens, *variant.replays))
    bucket = max(variant.bucket, largest)
    return replace(variant, name="", place=None, cost=1, devices=(), bucket=bucket)


def _for_mode(fields: Fields, mode: str) -> Fields:
    """A profile serves eager and graph cells alike: where nothing is captured, its graph keys say nothing."""
    if DRIVES[mode].graph:
        return fields
    kept = {key: value for key, value in fields.values.items() if key not in ("replays", "bucket")}
    return Fields(fields.node, kept)
