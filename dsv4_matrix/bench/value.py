"""Values of a JSON document, each with its place in it, where what is of the wrong kind is told and goes no further."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

T = TypeVar("T")

#: Positive numbers stand between these, both included: no time, rate or share that is measured is outside, and
#: quotients and products of a few such numbers stay finite and above zero, so that they have logarithms.
LEAST, MOST = 1e-9, 1e18
#: whole numbers stop where 64 bits do, so that products of a few can still be divided by
MOST_WHOLE = 2**63 - 1
#: characters of a wrong value that are shown
SHOWN = 60


class WrongValueError(ValueError):
    """A value that cannot stand in its place; the message has the place, what is expected, what is there."""


@dataclass(frozen=True)
class Value:
    """What was found at ``place``, such as ``shapes["peer table"][0].median``; every reading raises WrongValueError."""

    place: str
    found: Any

    def mistake(self, expected: str) -> WrongValueError:
        return WrongValueError(f"{self.place or 'the document'}: expected {expected}, got {shown(self.found)}")

    def text(self) -> str:
        if not isinstance(self.found, str):
            raise self.mistake("text")
        return self.found

    def flag(self) -> bool:
        if not isinstance(self.found, bool):
            raise self.mistake("true or false")
        return self.found

    def whole(self) -> int:
        """A number of things, 0 included."""
        return self._whole(0)

    def some(self) -> int:
        """A number of things of which there is at least one."""
        return self._whole(1)

    def _whole(self, least: int) -> int:
        if type(self.found) is not int or not least <= self.found <= MOST_WHOLE:
            raise self.mistake(f"a whole number of {least} or more, in 64 bits")
        return self.found

    def positive(self) -> float:
        if not self._is_number() or not LEAST <= self.found <= MOST:
            raise self.mistake(f"a number from {LEAST:g} to {MOST:g}")
        return self.found  # type: ignore[no-any-return]  # an int is left one: it is printed as it was written

    def amount(self) -> float:
        """A finite number, 0 included."""
        if not self._is_number() or not 0 <= self.found <= MOST:
            raise self.mistake(f"a number from 0 to {MOST:g}")
        return self.found  # type: ignore[no-any-return]

    def positive_or_null(self) -> float | None:
        return None if self.found is None else self.positive()

    def amount_or_null(self) -> float | None:
        return None if self.found is None else self.amount()

    def items(self) -> list[Value]:
        if not isinstance(self.found, list):
            raise self.mistake("a list")
        return [Value(f"{self.place}[{index}]", item) for index, item in enumerate(self.found)]

    def entries(self) -> dict[str, Value]:
        """By key, whatever the keys are."""
        if not isinstance(self.found, dict):
            raise self.mistake("an object")
        return {key: Value(_inside(self.place, key), item) for key, item in self.found.items()}

    def keys(self, needed: Collection[str], optional: Collection[str] = ()) -> dict[str, Value]:
        """By key, all of ``needed`` and no others than these and ``optional``."""
        entries = self.entries()
        missing = [key for key in needed if key not in entries]
        unknown = [key for key in entries if key not in needed and key not in optional]
        if missing or unknown:
            wrong = [f"no {', '.join(missing)}"] if missing else []
            wrong += [f"an unknown {', '.join(_key(key) for key in unknown)}"] if unknown else []
            allowed = f"an object with {', '.join(needed)}" + (
                f" and perhaps {', '.join(optional)}" if optional else ""
            )
            raise WrongValueError(f"{self.place or 'the document'}: expected {allowed}, got {' and '.join(wrong)}")
        return entries

    def record(self, kind: type[T], readers: Mapping[str, Callable[[Value], Any]], told: Collection[str] = ()) -> T:
        """A dataclass, each field by its reader; one with a default may be missing, as older documents leave it out.

        ``told`` are keys that stand beside the fields and follow from them.
        """
        defaults = {f.name for f in fields(kind) if f.default is not MISSING}  # type: ignore[arg-type]
        entries = self.keys([name for name in readers if name not in defaults], [*sorted(defaults), *told])
        return kind(**{name: reader(entries[name]) for name, reader in readers.items() if name in entries})

    def follows(self, right: str | float | None, of: str) -> None:
        """This is ``right``, up to rounding: it was worked out from other values of the document, as ``of`` says."""
        if isinstance(right, str) or right is None:
            same = self.found == right
        else:
            # an int may be too large for the float that isclose makes of it
            same = self._is_number() and abs(self.found) <= MOST / LEAST and math.isclose(self.found, right)
        if not same:
            raise self.mistake(f"{shown(right)}, {of}")

    def _is_number(self) -> bool:
        return isinstance(self.found, int | float) and not isinstance(self.found, bool)


def shown(value: Any) -> str:
    """A value as JSON on one line of ASCII, cut where it is long; of an object or a list only what it is."""
    if isinstance(value, dict | list) and value:
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _inside(place: str, key: str) -> str:
    named = _key(key)
    if named != key:
        return f"{place}[{named}]"
    return f"{place}.{key}" if place else key


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key) else shown(key)
