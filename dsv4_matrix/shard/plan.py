"""Which cell runs where: cells to shards, and the cells of a shard to workers. Pure, and the same in every process.

Longest processing time first: the costliest cell goes to whichever place has least so far. Costs are the static
integers of the declaration, never measured times, and ties fall by crc32 and then by the id, so that a plan depends on
the declaration and on nothing else. Both levels plan anew over their own cells: reusing one hash for both would send
every cell of a shard to the same worker.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

from dsv4_matrix.declaration.model import REFUSALS, Case
from dsv4_matrix.shard.cost import cost_of, other_test_cost


class PlanError(ValueError):
    """A division that would leave a shard without work, or that says nothing; the message is for the user."""


@dataclass(frozen=True)
class Unit:
    """What is never divided: the cases of one cell, so that they share compiled kernels and one place in the log.

    Attributes:
        id: cell id, or ``refusals``.
        cost: sum of the static costs of its cases, at least 1.
        cases: case ids, sorted.
        covered: whether they are variants of a covered cell; else they are probes.
    """

    id: str
    cost: int
    cases: tuple[str, ...]
    covered: bool = False


@dataclass(frozen=True)
class Shard:
    """Shard ``index`` of ``total``, counted from 1: ``2/4``."""

    index: int
    total: int

    def __str__(self) -> str:
        return f"{self.index}/{self.total}"


def parse_shard(text: str) -> Shard:
    """``2/4`` as a Shard. PlanError for anything else."""
    found = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text.strip(), re.ASCII)
    if found is None:
        raise PlanError(f"{text!r} is not a shard; write I/N, such as 2/4 for the second of four")
    index, total = int(found.group(1)), int(found.group(2))
    if not 1 <= index <= total:
        raise PlanError(f"there is no shard {index} of {total}; shards count from 1, the last is {total}/{total}")
    return Shard(index, total)


def units_of(cases: Iterable[Case], device: str) -> tuple[Unit, ...]:
    """The units of ``cases`` on ``device`` (``gpu`` or ``cpu``), sorted by id, in whatever order the cases come."""
    of_unit: dict[str, list[Case]] = {}
    for case in cases:
        of_unit.setdefault(case.unit, []).append(case)
    return tuple(
        Unit(
            name,
            max(1, sum(cost_of(case, device) for case in members)),
            tuple(sorted(case.id for case in members)),
            covered=any(case.kind == "case" for case in members),
        )
        for name, members in sorted(of_unit.items())
    )


def units_text(units: Sequence[Unit]) -> str:
    """``4 covered cells, 21 cells with a probe, the refusals``; kinds that are not there are left out."""
    cells = [unit for unit in units if unit.id != REFUSALS]
    covered = sum(unit.covered for unit in cells)
    told = [
        f"{count} {noun}{'' if count == 1 else 's'}{rest}"
        for count, noun, rest in ((covered, "covered cell", ""), (len(cells) - covered, "cell", " with a probe"))
        if count
    ]
    return ", ".join([*told, "the refusals"] if len(cells) < len(units) else told) or "nothing"


def divide(units: Sequence[Unit], places: int) -> tuple[tuple[Unit, ...], ...]:
    """``units`` over ``places``, one tuple a place, each sorted by id.

    No place stays empty while there are at least as many units as places. PlanError for less than one place or for a
    unit that occurs twice.
    """
    if places < 1:
        raise PlanError(f"{places} places: give at least one")
    if len({unit.id for unit in units}) != len(units):
        raise PlanError("a unit occurs twice in one plan")
    loads = [0] * places
    taken: list[list[Unit]] = [[] for _ in range(places)]
    for unit in sorted(units, key=lambda u: (-u.cost, crc32(u.id.encode()), u.id)):
        place = min(range(places), key=lambda k: (loads[k], k))
        loads[place] += unit.cost
        taken[place].append(unit)
    return tuple(tuple(sorted(members, key=lambda u: u.id)) for members in taken)


def shards_of(cases: Iterable[Case], device: str, total: int) -> tuple[tuple[Unit, ...], ...]:
    """The units of each of ``total`` shards. PlanError if one of them would have nothing to run."""
    units = units_of(cases, device)
    if total > len(units):
        idle = total - len(units)
        raise PlanError(
            f"{total} shard{'' if total == 1 else 's'} for {units_text(units)}: none of these is divided, so "
            f"{idle} shard{'' if idle == 1 else 's'} would run nothing; give at most {len(units)}"
        )
    return divide(units, total)


def cases_of_shard(cases: Sequence[Case], device: str, shard: Shard) -> tuple[Case, ...]:
    """Those of ``cases`` that ``shard`` runs on ``device``, in their order."""
    mine = {case_id for unit in shards_of(cases, device, shard.total)[shard.index - 1] for case_id in unit.cases}
    return tuple(case for case in cases if case.id in mine)


def divide_tests(
    nodeids: Sequence[str], cases: Mapping[str, Case], device: str, workers: int
) -> tuple[tuple[int, ...], ...]:
    """Indices into ``nodeids`` that each worker runs, in collection order.

    Args:
        nodeids: all collected tests, in order.
        cases: the case that a test runs, by node id. Tests that run none stay together by file.
        device: ``gpu`` or ``cpu``, where the cases run.
        workers: number of workers; some stay idle if there are fewer units.
    """
    members: dict[str, list[int]] = {}
    costs: dict[str, int] = {}
    for index, nodeid in enumerate(nodeids):
        case = cases.get(nodeid)
        name, cost = (
            (nodeid.partition("::")[0], other_test_cost(device)) if case is None else (case.unit, cost_of(case, device))
        )
        members.setdefault(name, []).append(index)
        costs[name] = costs.get(name, 0) + cost
    units = [Unit(name, max(1, cost), ()) for name, cost in costs.items()]
    return tuple(tuple(sorted(i for unit in place for i in members[unit.id])) for place in divide(units, workers))
