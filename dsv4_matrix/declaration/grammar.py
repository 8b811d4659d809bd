"""A small typed language for the shape of a file: one description both reads nodes and yields the JSON Schema."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsv4_matrix.declaration.mistakes import Mistakes, join, quote
from dsv4_matrix.declaration.model import Place
from dsv4_matrix.declaration.source import Items, Node, Pairs, Scalar, describe


class _Bad:
    """Stands for a value that was reported already; readers pass it on and rules skip it."""

    def __repr__(self) -> str:
        return "BAD"


#: The value of a node that did not fit its kind.
BAD: Any = _Bad()


@dataclass(frozen=True)
class Text:
    """Text that matches ``pattern`` whole; ``allowed`` says it in words. ``choices`` close the set."""

    allowed: str = "text on one line"
    pattern: str = r"\S(?:.*\S)?"
    choices: tuple[str, ...] = ()

    def read(self, node: Node, mistakes: Mistakes) -> Any:
        allowed = join(self.choices) if self.choices else self.allowed
        if not isinstance(node, Scalar) or not isinstance(node.value, str):
            mistakes.add(node.place, describe(node), allowed)
            return BAD
        fits = node.value in self.choices if self.choices else re.fullmatch(self.pattern, node.value) is not None
        if not fits:
            mistakes.add(node.place, describe(node), allowed)
            return BAD
        return node.value

    def json_schema(self, defs: dict[str, Any]) -> dict[str, Any]:
        if self.choices:
            return {"enum": list(self.choices)}
        return {"type": "string", "pattern": f"^(?:{self.pattern})$"}


@dataclass(frozen=True)
class Whole:
    """A whole number, never a boolean; ``choices`` close the set, else both bounds are inclusive."""

    minimum: int = 0
    maximum: int = 0
    choices: tuple[int, ...] = ()

    def read(self, node: Node, mistakes: Mistakes) -> Any:
        value = node.value if isinstance(node, Scalar) else None
        fits = isinstance(value, int) and not isinstance(value, bool)
        if fits:
            fits = value in self.choices if self.choices else self.minimum <= value <= self.maximum  # type: ignore[operator]
        if not fits:
            allowed = join(self.choices) if self.choices else f"a whole number from {self.minimum} to {self.maximum}"
            mistakes.add(node.place, describe(node), allowed)
            return BAD
        return value

    def json_schema(self, defs: dict[str, Any]) -> dict[str, Any]:
        if self.choices:
            return {"enum": list(self.choices)}
        return {"type": "integer", "minimum": self.minimum, "maximum": self.maximum}


@dataclass(frozen=True)
class Number:
    """A finite number from 0 to ``maximum``."""

    maximum: float = 1e6

    def read(self, node: Node, mistakes: Mistakes) -> Any:
        value = node.value if isinstance(node, Scalar) else None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not 0 <= value <= self.maximum:  # type: ignore[arg-type,operator]
            mistakes.add(node.place, describe(node), f"a number from 0 to {self.maximum:g}")
            return BAD
        return float(value)  # type: ignore[arg-type]

    def json_schema(self, defs: dict[str, Any]) -> dict[str, Any]:
        return {"type": "number", "minimum": 0, "maximum": self.maximum}


@dataclass(frozen=True)
class Flag:
    """true or false."""

    def read(self, node: Node, mistakes: Mistakes) -> Any:
        if not isinstance(node, Scalar) or not isinstance(node.value, bool):
            mistakes.add(node.place, describe(node), "true, false")
            return BAD
        return node.value

    def json_schema(self, defs: dict[str, Any]) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True)
class Known:
    """true, false, or the word unknown, which is read as None."""

    def read(self, node: Node, mistakes: Mistakes) -> Any:
        value = node.value if isinstance(node, Scalar) else None
        if isinstance(value, bool):
            return value
        if value == "unknown":
            return None
        mistakes.add(node.place, describe(node), "true, false, unknown")
        return BAD

    def json_schema(self, defs: dict[str, Any]) -> dict[str, Any]:
        return {"enum": [True, False, "unknown"]}


@dataclass(frozen=True)
class ListOf:
    """A list of ``least`` to ``most`` items, read into a tuple."""

    item: Kind
    least: int = 0
    most: int = 256
    unique: bool = False

    def read(self, node: Node, mistakes: Mistakes) -> Any:
        if not isinstance(node, Items) or not self.least <= len(node.nodes) <= self.most:
            mistakes.add(node.place, describe(node), f"a list of {self.least} to {self.most}")
            return BAD
        values = tuple(self.item.read(item, mistakes) for item in node.nodes)
        if self.unique:
            for index, (value, item) in enumerate(zip(values, node.nodes, strict=True)):
                if value is not BAD and value in values[:index]:
                    mistakes.add(item.place, f"{value} a second time", "each item once")
        return BAD if any(value is BAD for value in values) else values

    def json_schema(self, defs: dict[str, Any]) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array", "items": self.item.json_schema(defs), "maxItems": self.most}
        if self.least:
            schema["minItems"] = self.least
        if self.unique:
            schema["uniqueItems"] = True
        return schema


@dataclass(frozen=True)
class Key:
    """One key of a record; ``summary`` is what an editor shows."""

    kind: Kind
    summary: str
    required: bool = False


@dataclass(frozen=True)
class Fields:
    """A record as read: values by key (only keys that are present) and the node, for places."""

    node: Pairs
    values: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    @property
    def sound(self) -> bool:
        """No value directly in this record was bad."""
        return all(value is not BAD for value in self.values.values())

    def place(self, key: str = "", index: int | None = None) -> Place:
        """Of the value of ``key``, of its item ``index``, or of the record where the key is absent."""
        for name, node in self.node.pairs:
            if name.text == key:
                if index is not None and isinstance(node, Items) and index < len(node.nodes):
                    return node.nodes[index].place
                return node.place
        return self.node.place


@dataclass(frozen=True)
class Record:
    """A mapping with known keys, read into ``Fields``.

    ``title`` is an article and one noun, the record's name in the JSON Schema. ``when`` is added to that schema: a
    condition between keys that the loader holds by a rule of its own.
    """

    title: str
    keys: Mapping[str, Key]
    when: Mapping[str, Any] = field(default_factory=dict)

    def read(self, node: Node, mistakes: Mistakes) -> Any:
        if not isinstance(node, Pairs):
            mistakes.add(node.place, describe(node), f"a mapping: {self.title} with {join(self.keys)}")
            return BAD
        values: dict[str, Any] = {}
        for name, value in node.pairs:
            key = self.keys.get(name.text)
            if key is None:
                mistakes.add(name.place, f"the unknown key {quote(name.text)} in {self.title}", join(self.keys))
            else:
                values[name.text] = key.kind.read(value, mistakes)
        for text, key in self.keys.items():
            if key.required and text not in values:
                mistakes.add(node.place, f"{self.title} without {text}", f"{text}: {key.summary}")
                values[text] = BAD
        return Fields(node, values)

    def json_schema(self, defs: dict[str, Any]) -> dict[str, Any]:
        name = self.title.split()[-1]
        if name not in defs:
            defs[name] = {
                "title": self.title,
                "type": "object",
                "additionalProperties": False,
                "required": [name for name, key in self.keys.items() if key.required],
                "properties": {
                    name: {"description": key.summary, **key.kind.json_schema(defs)} for name, key in self.keys.items()
                },
            }
            if self.when:
                defs[name].update(self.when)
        return {"$ref": f"#/$defs/{name}"}


@dataclass(frozen=True)
class Entries:
    """A table as read: values by name in file order, and the places of the names."""

    values: Mapping[str, Any]
    places: Mapping[str, Place]


@dataclass(frozen=True)
class Table:
    """A mapping from free names to values of one kind, read into ``Entries``."""

    title: str
    name: Text
    value: Kind
    least: int = 1
    most: int = 256

    def read(self, node: Node, mistakes: Mistakes) -> Any:
        if not isinstance(node, Pairs) or not self.least <= len(node.pairs) <= self.most:
            mistakes.add(node.place, describe(node), f"a mapping of {self.title}, {self.least} to {self.most} of them")
            return BAD
        values: dict[str, Any] = {}
        places: dict[str, Place] = {}
        for name, value in node.pairs:
            if self.name.read(name, mistakes) is not BAD:
                values[name.text] = self.value.read(value, mistakes)
                places[name.text] = name.place
        return Entries(values, places)

    def json_schema(self, defs: dict[str, Any]) -> dict[str, Any]:
        return {
            "type": "object",
            "title": self.title,
            "minProperties": self.least,
            "maxProperties": self.most,
            "propertyNames": self.name.json_schema(defs),
            "additionalProperties": self.value.json_schema(defs),
        }


Kind = Text | Whole | Number | Flag | Known | ListOf | Record | Table
