"""Configuration values that a rule replaces: frozen, replaced in a copy, and recorded for the report."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar

Config = TypeVar("Config")


@dataclass(frozen=True)
class Forced:
    """One value of a configuration that a rule replaced, for the report. Values as text."""

    field: str
    old: str
    new: str
    rule: str


def override(config: Config, rule: str, **changes: Any) -> tuple[Config, tuple[Forced, ...]]:
    """A new frozen configuration with ``changes``, and a record of those that changed something.

    ``config`` stays as it is, so that whoever shares it sees nothing. TypeError unless it is a frozen dataclass with
    these fields.
    """
    parameters = getattr(type(config), "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        raise TypeError(f"override: {type(config).__name__} is not a frozen dataclass; a shared one would change")
    fields = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    if unknown := sorted(changes.keys() - fields):
        raise TypeError(f"override: {type(config).__name__} has no {', '.join(unknown)}")
    forced = tuple(
        Forced(name, repr(getattr(config, name)), repr(value), rule)
        for name, value in sorted(changes.items())
        if getattr(config, name) != value
    )
    return dataclasses.replace(config, **changes), forced  # type: ignore[type-var]
