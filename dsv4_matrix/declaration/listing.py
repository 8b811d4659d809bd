"""The declaration for a terminal and for programs: what ``check``, ``list`` and ``explain`` print."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from difflib import get_close_matches
from typing import Any

from dsv4_matrix.declaration.model import Case, Cell, Matrix, Probe, State
from dsv4_matrix.declaration.sites import CALL_SITES
from dsv4_matrix.declaration.wording import LEVELS, agreement_text, variant_text

_NEAR = 5


class UnknownNameError(LookupError):
    """No cell and no case of that name; the message shows names near it."""


def counts_text(matrix: Matrix) -> str:
    """How much is declared: cells by state, cases by kind and device, and the static cost per device."""
    states = Counter(cell.state.value for cell in matrix.cells)
    kinds = Counter(case.kind for case in matrix.cases())
    cells = ", ".join(f"{states[state.value]} {state.value}" for state in State if states[state.value])
    lines = [
        f"{len(matrix.cells)} cells: {cells}",
        f"{len(matrix.cases())} cases: {kinds['case']} variants, {kinds['probe']} probes, {kinds['refusal']} refusals",
    ]
    for device, name in (("cpu", "CPU"), ("gpu", "GPU")):
        variants = [case.variant for case in matrix.cases(device) if case.variant]
        cost = sum(variant.cost for variant in variants)
        lines.append(f"{name}: {len(variants)} variants, static cost {cost} row-blocks")
    return "\n".join(lines)


def cells_json(matrix: Matrix) -> dict[str, Any]:
    """``{"cells": [{"id", "ratio", "mode", "state", "reason", "probe", "variants"}]}``.

    A covered cell has no reason and no probe (null); any other has no variants. A variant holds every field of
    ``model.Variant`` with its defaults filled in, and the ``case_id`` and ``seed`` of its case.
    """
    cases = _cases_of_cells(matrix)
    return {
        "cells": [
            {
                "id": cell.id,
                "ratio": cell.ratio,
                "mode": cell.mode,
                "state": cell.state.value,
                "reason": cell.reason or None,
                "probe": asdict(cell.probe) if cell.probe else None,
                "variants": [_variant_json(case) for case in cases[cell.id] if case.variant],
            }
            for cell in matrix.cells
        ]
    }


def cells_text(matrix: Matrix) -> str:
    """One line a cell, and below it one line a case; refusals outside the cells last."""
    cases = _cases_of_cells(matrix)
    lines = []
    for cell in matrix.cells:
        tail = _count(len(cell.variants), "variant") if cell.variants else f"{cell.state.value}: {cell.reason}"
        lines.append(f"{cell.id}  {'covered, ' if cell.variants else ''}{tail}")
        lines += [f"  {case.id}" for case in cases[cell.id]]
    lines.append("refusals outside the cells")
    lines += [f"  {case.id}" for case in matrix.cases() if case.kind == "refusal"]
    return "\n".join(lines)


def named(matrix: Matrix, name: str) -> Case | Cell:
    """The case or the cell called ``name``. UnknownNameError if there is neither."""
    for case in matrix.cases():
        if case.id == name:
            return case
    try:
        return matrix.cell(name)
    except KeyError:
        raise UnknownNameError(_unknown(matrix, name)) from None


def explain_text(matrix: Matrix, name: str, kernels: Sequence[str] = (), given: Sequence[str] = ()) -> str:
    """All about the cell or the case called ``name``; ``kernels`` are lines on what serves the covered ones.

    ``given`` are options, with their values, that the command which runs it needs beside ``--cells``.

    Raises:
        UnknownNameError: there is neither.
    """
    found = named(matrix, name)
    if isinstance(found, Case):
        promise = [_promise_line(found.cell)] if found.cell and found.variant else []
        served = kernels if found.variant else ()
        return "\n".join([*_case_lines(found), *promise, *served, _run_line(found.id, given)])
    return _cell_text(matrix, found, kernels, given)


def _cell_text(matrix: Matrix, cell: Cell, kernels: Sequence[str], given: Sequence[str]) -> str:
    title = next(mode for mode in matrix.modes if mode.name == cell.mode)
    lines = [f"{cell.id}: {cell.state.value}", f"  {title.title}, ratio {cell.ratio}: {title.summary}"]
    if cell.place:
        lines.append(f"  declared at {cell.place}")
    if cell.variants:
        lines.append(_promise_line(cell))
    lines += [f"  {agreement_text(bits)}" for bits in cell.prefill_bits]
    cases = _cases_of_cells(matrix)[cell.id]
    for case in cases:
        lines += ["", *_case_lines(case)]
    pattern = cases[0].id if len(cases) == 1 else _pattern(matrix, cell)
    told = ["", *kernels] if cell.variants and kernels else []
    return "\n".join([*lines, *told, "", _run_line(pattern, given)])


def _promise_line(cell: Cell) -> str:
    return f"  promises {cell.promise.value}: {LEVELS[cell.promise]}"


def _cases_of_cells(matrix: Matrix) -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {cell.id: [] for cell in matrix.cells}
    for case in matrix.cases():
        if case.cell:
            found[case.cell_id].append(case)
    return found


def _variant_json(case: Case) -> dict[str, Any]:
    assert case.variant is not None
    fields = {key: value for key, value in asdict(case.variant).items() if key != "place"}
    return {"case_id": case.id, "seed": case.seed, **fields}


def _case_lines(case: Case) -> list[str]:
    if case.variant:
        devices = " and ".join(device.upper() for device in case.variant.devices)
        place = f", {case.variant.place}" if case.variant.place else ""
        return [
            f"{case.id}",
            f"  {variant_text(case.variant)}",
            f"  on {devices}, seed {case.seed}, cost {case.variant.cost}{place}",
        ]
    assert case.probe is not None
    return [case.id, f"  reason: {case.reason}", *(f"  {line}" for line in _probe_lines(case.probe))]


def _probe_lines(probe: Probe) -> list[str]:
    return [
        f"probe: {probe.site} ({CALL_SITES[probe.site].does})",
        f"must raise {probe.raises} with a message that matches {probe.match!r}",
    ]


def _pattern(matrix: Matrix, cell: Cell) -> str:
    """A pattern that selects the cases of ``cell`` and no others; ids are never parsed, so this is looked at."""
    prefix = f"r{cell.ratio}-{cell.mode}-"
    own = {case.id for case in _cases_of_cells(matrix)[cell.id]}
    selected = {case.id for case in matrix.cases() if case.id.startswith(prefix)}
    return f"{prefix}*" if selected == own else ",".join(sorted(own))


def _run_line(pattern: str, given: Sequence[str]) -> str:
    return " ".join([f"run it: dsv4-matrix run --cells '{pattern}'", *map(shlex.quote, given)])


def _unknown(matrix: Matrix, name: str) -> str:
    names = [*(cell.id for cell in matrix.cells), *(case.id for case in matrix.cases())]
    asked = name.lower().rstrip("*")
    # A name's beginning, r4 say, is too short to be close to any of those that go on from there.
    further = [known for known in names if asked and known.startswith(asked)]
    near = list(dict.fromkeys([*further, *get_close_matches(asked, names, n=_NEAR, cutoff=0.5)]))
    more = f" and {len(near) - _NEAR} more" if len(near) > _NEAR else ""
    hint = f"near it: {', '.join(near[:_NEAR])}{more}" if near else "see them with 'dsv4-matrix list'"
    return f"no cell or case {name[:80]!r}; {hint}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
