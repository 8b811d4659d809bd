"""Whether a probe's pattern names what is refused: one that takes any message passes whatever goes wrong.

Patterns are judged by the tree into which Python's ``re`` parses them, so that one that would hang is never tried. The
parser, ``re._parser``, is private and has no public equal; ``tests/declaration/test_patterns.py`` pins its tree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import Any

#: The fewest letters, digits or underscores in a row that are a name: ``swa``, ``512``, ``top``.
LEAST_NAME = 3
#: A set of so few characters still names, as in ``25[67]``.
_NAMING_SET = 4
#: In how many ways a pattern may match a line of ``_LINE`` characters: two ``.*`` and ten alternatives. With a repeat
#: within a repeat it is exponential in the line, so that one long message would hang a run.
MOST_WAYS = 100_000
_LINE = 100

#: What Python and PyTorch say, with the exception types that a probe may expect, when a backend has an ordinary bug.
#: No words of the protocol are in them. All are short: a pattern that came so far is quick on them.
ACCIDENTS = (
    "not enough values to unpack (expected 2, got 1)",
    "invalid literal for int() with base 10: 'x'",
    "unsupported operand type(s) for +: 'int' and 'NoneType'",
    "'NoneType' object is not subscriptable",
    "f() missing 1 required positional argument: 'x'",
    "CUDA error: an illegal memory access was encountered",
    "The size of tensor a (3) must match the size of tensor b (7) at non-singleton dimension 0",
    "This function is not implemented on this device",
    "assertion failed: the value should not be None",
)


def fault_of(pattern: str) -> tuple[str, str] | None:
    """What is wrong with ``pattern``, and what is allowed; None if it names what is refused.

    Raises:
        re.error, OverflowError, RecursionError: not a regular expression that Python compiles.
    """
    compiled = re.compile(pattern)
    tree = import_module("re._parser").parse(pattern)
    if _ways(tree) > MOST_WAYS:
        return (
            f"matches a line of {_LINE} characters in more than {MOST_WAYS:,} ways",
            "no repeat or alternative within a repeat, and at most two of * and +",
        )
    if (named := _name(tree).best) < LEAST_NAME:
        return (
            f"spells out {named} letters or digits in a row",
            f"{LEAST_NAME} or more in every alternative, of what is refused",
        )
    for message in ACCIDENTS:
        if compiled.search(message):
            return f"also matches {message!r}", "words that only a message about what is refused has"
    return None


def _parts(operation: Any, argument: Any) -> Iterable[Any]:
    """The patterns within one operation, for those that are no repeat."""
    match operation.name:
        case "SUBPATTERN":
            return (argument[3],)
        case "ATOMIC_GROUP":
            return (argument,)
        case "ASSERT" | "ASSERT_NOT":
            return (argument[1],)
        case "BRANCH":
            return tuple(argument[1])
        case "GROUPREF_EXISTS":
            return argument[1], argument[2] or ()
    return ()


def _is_repeat(operation: Any) -> bool:
    return bool(operation.name.endswith("_REPEAT"))


def _ways(tree: Any) -> int:
    """An upper bound, cut off above ``MOST_WAYS``, of the ways to match one line from one place."""
    total = 1
    for operation, argument in tree:
        if _is_repeat(operation):
            least, most = (min(int(bound), _LINE) for bound in argument[:2])
            total *= _ways(argument[2]) ** most * (most - least + 1)
        else:
            total *= sum(_ways(part) for part in _parts(operation, argument)) or 1
        total = min(total, MOST_WAYS + 1)
    return total


@dataclass(frozen=True)
class _Name:
    """Naming characters in a row that every match has: at its start, anywhere, at its end; ``whole`` if no others."""

    lead: int = 0
    best: int = 0
    trail: int = 0
    whole: bool = True

    def then(self, other: _Name) -> _Name:
        return _Name(
            self.lead + (other.lead if self.whole else 0),
            max(self.best, other.best, self.trail + other.lead),
            other.trail + (self.trail if other.whole else 0),
            self.whole and other.whole,
        )

    def or_else(self, other: _Name) -> _Name:
        return _Name(
            min(self.lead, other.lead),
            min(self.best, other.best),
            min(self.trail, other.trail),
            self.whole and other.whole,
        )


_ANYTHING = _Name(whole=False)
_CHARACTER = _Name(1, 1, 1)


def _name(tree: Any) -> _Name:
    return reduce(_Name.then, (_name_of(operation, argument) for operation, argument in tree), _Name())


def _name_of(operation: Any, argument: Any) -> _Name:
    if _is_repeat(operation):
        least, _, body = argument
        inner = _name(body)
        return _Name(inner.lead, inner.best, inner.trail, whole=False) if least else _ANYTHING
    match operation.name:
        case "LITERAL":
            return _CHARACTER if _names(argument) else _ANYTHING
        case "IN":
            naming = all(kind.name == "LITERAL" and _names(value) for kind, value in argument)
            return _CHARACTER if naming and len(argument) <= _NAMING_SET else _ANYTHING
        case "AT" | "ASSERT_NOT":
            return _Name()
        case "ASSERT":
            return _Name(best=_name(argument[1]).best)
    parts = [_name(part) for part in _parts(operation, argument)]
    return reduce(_Name.or_else, parts) if parts else _ANYTHING


def _names(code: int) -> bool:
    return chr(code).isalnum() or chr(code) == "_"
