"""Which place serves a case or request: a pure function of its id, so that no load, clock or arrival can move it.

Routing decides more than speed: a replica's seed and batch follow from it, so results do. What looks stable is not:
``hash()`` of a string is salted per process, a least-loaded choice with a stable tie-break still follows the load, and
a hash over a serialised body changes with the order of its keys. A router therefore sees canonical ids and a number of
places, and nothing else. The default is crc32, equal on every machine; another one is named as ``module:attribute``.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Protocol, runtime_checkable
from zlib import crc32

from dsv4_matrix.import_fault import ENDINGS, said
from dsv4_matrix.shard.plan import Unit, divide

_ID = re.compile(r"[a-z0-9._=+-]{1,200}", re.ASCII)

Places = tuple[tuple[str, ...], ...]


class RoutingError(ValueError):
    """Ids that are not canonical, or a router that is not a pure partition of them."""


@runtime_checkable
class Router(Protocol):
    """Anything with this method; a subclass or a class of the user's own."""

    def assign(self, ids: Sequence[str], places: int) -> Places:
        """Ids of each place, sorted; every id in exactly one. Depends on the set of ids, not on their order."""
        ...


@dataclass(frozen=True)
class ByHash:
    """Each id by crc32 of itself, or of its group: adding an id moves no other.

    Attributes:
        groups: ids that must stay together, such as those that share an expensive fixture, to their group's name.
        divided_by: places of the level above. Taking crc32 modulo both counts would leave a level's ids in one place
            (4 runners with 4 workers each: one worker gets everything), so the quotient is used.
    """

    groups: Mapping[str, str] = field(default_factory=dict)
    divided_by: int = 1

    def assign(self, ids: Sequence[str], places: int) -> Places:
        found: list[list[str]] = [[] for _ in range(places)]
        for name in sorted(ids):
            found[self.place(name, places)].append(name)
        return tuple(map(tuple, found))

    def place(self, name: str, places: int) -> int:
        """Where one id goes, from 0."""
        return crc32(self.groups.get(name, name).encode()) // self.divided_by % places


@dataclass(frozen=True)
class ByCost:
    """Longest first onto the least total, as cells go to workers: better balanced, but adding an id may move others.

    Attributes:
        costs: positive integers from a declaration, never measured times; 1 where absent.
    """

    costs: Mapping[str, int] = field(default_factory=dict)

    def assign(self, ids: Sequence[str], places: int) -> Places:
        units = [Unit(name, self.costs.get(name, 1), ()) for name in ids]
        return tuple(tuple(unit.id for unit in place) for place in divide(units, places))


def route(ids: Sequence[str], places: int, router: Router | None = None) -> Places:
    """``router``'s assignment, checked.

    Raises:
        RoutingError: ids that are not canonical or not unique, no place, or a router whose answer is no partition or
            depends on the order in which ids arrive.
    """
    check_ids(ids)
    if places < 1:
        raise RoutingError(f"route: {places} places; give at least 1")
    router = ByHash() if router is None else router
    found = router.assign(ids, places)
    name = type(router).__name__
    if len(found) != places or sorted(chain.from_iterable(found)) != sorted(ids):
        raise RoutingError(f"{name} did not put each of {len(ids)} ids into exactly one of {places} places")
    if router.assign(list(reversed(ids)), places) != found:
        raise RoutingError(f"{name} put ids elsewhere when they came in another order; it must look at the ids alone")
    return found


def check_ids(ids: Sequence[str]) -> None:
    """RoutingError unless ids are unique and of at most 200 characters ``a-z 0-9 . _ = + -``."""
    if isinstance(ids, set | frozenset):
        raise RoutingError("ids came as a set, whose order differs between processes; give a list or tuple")
    for name in ids:
        if not _ID.fullmatch(name):
            raise RoutingError(f"id {name!r} is not 1 to 200 characters of a-z 0-9 . _ = + -")
    if twice := sorted(name for name, count in Counter(ids).items() if count > 1):
        raise RoutingError(f"ids occur twice: {', '.join(twice)}")


def load_router(path: str) -> Router:
    """The router at ``module:attribute``, an instance or a class without arguments. RoutingError if it is none."""
    module, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise RoutingError(f"router {path!r}: {error}; write module:attribute") from None
    except ENDINGS as error:
        raise RoutingError(f"router {path!r}: module {module} does not import: {said(error, Path.cwd())}") from error
    try:
        router = found() if isinstance(found, type) else found
    except ENDINGS as error:
        raise RoutingError(f"router {path!r} cannot be made: {said(error, Path.cwd())}") from error
    if not isinstance(router, Router):
        raise RoutingError(f"router {path!r} has no assign(ids, places)")
    return router
