"""YAML bytes as nodes with places: the part that meets hostile input, so it refuses what a declaration never needs.

Nodes are built from the parser's events with an explicit stack. Nothing is expanded, constructed or imported, and the
work is bounded: by bytes and line lengths before parsing, then by depth and by count. Scalars follow the core schema
of YAML 1.2, decimal numbers only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsv4_matrix.declaration.mistakes import DeclarationError, Mistake, Mistakes, quote
from dsv4_matrix.declaration.model import Place

MAX_BYTES = 1 << 20
#: The parser's scan of a single token is quadratic in places (a tag of 1 MiB takes 20 seconds); tokens end with lines.
MAX_LINE = 4096
#: The deepest declaration, a list of lengths inside a variant of a cell, nests seven levels.
MAX_DEPTH = 16
#: Events of the pure-Python parser take about 20 microseconds each; this bounds a hostile file to a second.
#: The repository's declaration has under 5,000.
MAX_NODES = 20_000

_WHOLE = re.compile(r"[-+]?[0-9]{1,18}")
_NUMBER = re.compile(r"[-+]?(?:[0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})(?:[eE][-+]?[0-9]{1,3})?")
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("null", "Null", "NULL", "~", ""), None),
}


@dataclass(frozen=True)
class Scalar:
    """A leaf: its text as written, and the value that the core schema gives it."""

    place: Place
    text: str
    value: str | int | float | bool | None


@dataclass(frozen=True)
class Items:
    """A sequence."""

    place: Place
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Pairs:
    """A mapping, in file order; keys are unique scalars."""

    place: Place
    pairs: tuple[tuple[Scalar, Node], ...]


Node = Scalar | Items | Pairs


def describe(node: Node) -> str:
    """What stands there, for the found part of a mistake."""
    if isinstance(node, Items):
        return f"a list of {len(node.nodes)}"
    if isinstance(node, Pairs):
        return f"a mapping of {len(node.pairs)} keys"
    if node.value is None:
        return "nothing"
    if isinstance(node.value, bool):
        return f"the boolean {node.text}"
    if isinstance(node.value, int | float):
        return f"the number {node.text}"
    return f"the text {quote(node.text)}"


def parse(data: bytes, path: str) -> Node:
    """The only document of ``data``. ``path`` names the file in places.

    Raises:
        DeclarationError: too large, not UTF-8, invalid YAML, or YAML that a declaration may not use.
    """
    if len(data) > MAX_BYTES:
        raise _refusal(Place(path, 1, 1), f"a file of {len(data)} bytes", f"at most {MAX_BYTES} bytes")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line_start = before.rfind(b"\n") + 1
        place = Place(path, before.count(b"\n") + 1, len(before[line_start:].decode("utf-8")) + 1)
        raise _refusal(place, f"the byte 0x{data[error.start]:02x}, which is not UTF-8", "UTF-8 text") from None
    if not text.strip():
        raise _refusal(Place(path, 1, 1), "an empty file", "a mapping with the key schema")
    for number, line in enumerate(text.replace("\r", "\n").split("\n"), start=1):
        if len(line) > MAX_LINE:
            raise _refusal(
                Place(path, number, MAX_LINE + 1), f"a line of {len(line)} characters", f"at most {MAX_LINE}"
            )
    mistakes = Mistakes()
    root = _build(_events(text, path), path, mistakes)
    mistakes.raise_any()
    return root


def _refusal(place: Place, found: str, allowed: str) -> DeclarationError:
    return DeclarationError((Mistake(place, found, allowed),))


def _events(text: str, path: str) -> Iterator[Any]:
    """Parser events; whatever the parser raises on bad input becomes a DeclarationError."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    last = Place(path, 1, 1)
    try:
        for event in YAML(typ="safe", pure=True).parse(text):
            last = _place(event, path)
            yield event
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(path, mark.line + 1, mark.column + 1) if mark else last
        problem = " ".join(str(error.problem or error.context or "invalid YAML").split())
        raise _refusal(place, f"invalid YAML ({problem})", "valid YAML 1.2") from None
    except YAMLError as error:
        # The reader reports characters that no YAML may hold by offset, without a mark.
        position = getattr(error, "position", None)
        place = _offset_place(text, position, path) if isinstance(position, int) else last
        reason = getattr(error, "reason", None) or "invalid YAML"
        raise _refusal(place, f"invalid YAML ({reason})", "valid YAML 1.2 of printable characters") from None
    except (ValueError, IndexError, KeyError, AttributeError, TypeError, OverflowError, AssertionError) as error:
        # ruamel's scanner lets some of Python's own errors out on malformed input (such as "\UFFFFFFFF").
        raise _refusal(last, f"YAML that the parser breaks on ({error})", "valid YAML 1.2") from None


def _place(event: Any, path: str) -> Place:
    mark = event.start_mark
    return Place(path, mark.line + 1, mark.column + 1)


def _offset_place(text: str, offset: int, path: str) -> Place:
    before = text[:offset]
    return Place(path, before.count("\n") + 1, offset - (before.rfind("\n") + 1) + 1)


class _Open:
    """A collection under construction; ``key`` is the pending key of a mapping."""

    def __init__(self, place: Place, mapping: bool) -> None:
        self.place = place
        self.mapping = mapping
        self.nodes: list[Node] = []
        self.pairs: list[tuple[Scalar, Node]] = []
        self.first: dict[str, Place] = {}
        self.key: Scalar | None = None
        self.drop = False

    def close(self) -> Node:
        return Pairs(self.place, tuple(self.pairs)) if self.mapping else Items(self.place, tuple(self.nodes))


def _build(events: Iterator[Any], path: str, mistakes: Mistakes) -> Node:
    from ruamel.yaml import events as kinds

    stack: list[_Open] = []
    root: Node | None = None
    count = 0
    for event in events:
        place = _place(event, path)
        if isinstance(event, kinds.DocumentStartEvent):
            if event.version or event.tags:
                raise _refusal(place, "a YAML directive", "a document without % directives")
            if root is not None:
                raise _refusal(place, "a second document", "one document")
        elif isinstance(event, kinds.AliasEvent):
            raise _refusal(place, f"the alias *{event.anchor}", "values written out; reuse variants by profiles")
        elif isinstance(event, kinds.ScalarEvent | kinds.SequenceStartEvent | kinds.MappingStartEvent):
            count += 1
            _refuse_decorations(event, place)
            if count > MAX_NODES:
                raise _refusal(place, f"more than {MAX_NODES} values", f"at most {MAX_NODES} values")
            if isinstance(event, kinds.ScalarEvent):
                root = _attach(_scalar(event, place), stack, root, mistakes)
                continue
            if len(stack) >= MAX_DEPTH:
                raise _refusal(place, f"nesting deeper than {MAX_DEPTH} levels", f"at most {MAX_DEPTH} levels")
            if stack and stack[-1].mapping and stack[-1].key is None:
                raise _refusal(place, "a list or mapping used as a key", "plain text keys")
            stack.append(_Open(place, isinstance(event, kinds.MappingStartEvent)))
        elif isinstance(event, kinds.SequenceEndEvent | kinds.MappingEndEvent):
            root = _attach(stack.pop().close(), stack, root, mistakes)
    if root is None:
        raise _refusal(Place(path, 1, 1), "a file without a value", "a mapping with the key schema")
    return root


def _refuse_decorations(event: Any, place: Place) -> None:
    if event.anchor:
        raise _refusal(place, f"the anchor &{event.anchor}", "values without anchors; reuse variants by profiles")
    if event.tag:
        raise _refusal(place, f"the tag {quote(str(event.tag))}", "values without tags")


def _scalar(event: Any, place: Place) -> Scalar:
    text: str = event.value
    plain = event.style is None or event.style == ""
    if not plain:
        return Scalar(place, text, text)
    if text in _WORDS:
        return Scalar(place, text, _WORDS[text])
    if _WHOLE.fullmatch(text):
        return Scalar(place, text, int(text))
    if _NUMBER.fullmatch(text):
        return Scalar(place, text, float(text))
    return Scalar(place, text, text)


def _attach(node: Node, stack: list[_Open], root: Node | None, mistakes: Mistakes) -> Node | None:
    """Hang ``node`` into the innermost open collection; returns the root, which is ``node`` when none is open."""
    if not stack:
        return node
    top = stack[-1]
    if not top.mapping:
        top.nodes.append(node)
    elif top.key is None:
        if not isinstance(node, Scalar):
            raise _refusal(node.place, "a list or mapping used as a key", "plain text keys")
        if node.text == "<<":
            raise _refusal(node.place, "the merge key <<", "values written out; reuse variants by profiles")
        top.key = node
        earlier = top.first.setdefault(node.text, node.place)
        top.drop = earlier != node.place
        if top.drop:
            where = f"line {earlier.line}, column {earlier.column}"
            mistakes.add(node.place, f"the key {quote(node.text)} a second time", f"each key once (first: {where})")
    else:
        if not top.drop:
            top.pairs.append((top.key, node))
        top.key = None
    return root
