"""How a result travels from an xdist worker: as pytest user properties, so that it reaches JUnit files as well.

Only str, bool and small int may travel: execnet ends the whole run on a numpy scalar or an int below -2**31.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields

from dsv4_matrix.report.result import Outcome, Result

PREFIX = "matrix_"
#: Extra property for people: the message with its traceback. Not part of the result.
MESSAGE = "matrix_message"
#: Extra property for telemetry: seconds by phase, as JSON.
SPENT = "matrix_spent"

_FIELDS = tuple(f.name for f in fields(Result))


def to_properties(result: Result) -> list[tuple[str, object]]:
    """``(name, value)`` pairs for ``item.user_properties``. TypeError for a value that must not travel."""
    properties: list[tuple[str, object]] = []
    for name in _FIELDS:
        value = getattr(result, name)
        value = value.value if isinstance(value, Outcome) else value
        if type(value) not in (str, bool, int) or (type(value) is int and not 0 <= value < 2**31):
            raise TypeError(
                f"case {result.id}: {name} must be str, bool or an int of 31 bits, got {value!r} "
                f"({type(value).__name__}); convert it where the result is made"
            )
        properties.append((PREFIX + name, value))
    return properties


def from_properties(properties: Iterable[tuple[str, object]]) -> Result | None:
    """The result in ``properties``, or None if there is none."""
    found = {name.removeprefix(PREFIX): value for name, value in properties if name.startswith(PREFIX)}
    if not found.keys() >= set(_FIELDS):
        return None
    return Result(**{name: Outcome(found[name]) if name == "outcome" else found[name] for name in _FIELDS})  # type: ignore[arg-type]


def spent_property(spent: Mapping[str, float]) -> tuple[str, object]:
    """Seconds by phase as a property, to the microsecond."""
    return SPENT, json.dumps({phase: round(seconds, 6) for phase, seconds in spent.items()})


def spent_in(properties: Iterable[tuple[str, object]]) -> dict[str, float]:
    """Seconds by phase in ``properties``; empty if there are none."""
    found: dict[str, float] = json.loads(str(dict(properties).get(SPENT, "{}")))
    return found
