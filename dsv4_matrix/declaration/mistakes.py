"""Mistakes of a declaration: where, what was found, what is allowed; several are reported together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dsv4_matrix.declaration.model import Place

#: More than this does not fit one screen; the rest is counted.
SHOWN = 20
#: Found text is quoted up to this many characters, so that a hostile scalar cannot fill the terminal.
QUOTED = 60


@dataclass(frozen=True)
class Mistake:
    """One mistake. ``str()`` is ``file:line:column: found ...; allowed: ...``."""

    place: Place
    found: str
    allowed: str

    def __str__(self) -> str:
        return f"{self.place}: found {self.found}; allowed: {self.allowed}"


class DeclarationError(Exception):
    """A declaration that cannot be used, with every mistake that was found in it.

    Attributes:
        mistakes: each once, in the order of their places; never empty.
    """

    def __init__(self, mistakes: tuple[Mistake, ...]) -> None:
        if not mistakes:
            raise ValueError("a DeclarationError needs at least one mistake")
        # Once each: a profile's mistake is found again by every cell that uses it.
        once = dict.fromkeys(mistakes)
        self.mistakes = tuple(sorted(once, key=lambda m: (m.place.path, m.place.line, m.place.column, m.found)))
        super().__init__(str(self))

    def __reduce__(self) -> tuple[type[DeclarationError], tuple[tuple[Mistake, ...]]]:
        return DeclarationError, (self.mistakes,)

    def __str__(self) -> str:
        lines = [str(mistake) for mistake in self.mistakes[:SHOWN]]
        rest = len(self.mistakes) - SHOWN
        if rest > 0:
            lines.append(f"... and {rest} more; mend the first ones and check again")
        return "\n".join(lines)


class Mistakes:
    """Collects mistakes while a file is read, so that one run shows all of them."""

    def __init__(self) -> None:
        self._found: list[Mistake] = []

    def add(self, place: Place, found: str, allowed: str) -> None:
        self._found.append(Mistake(place, found, allowed))

    @property
    def count(self) -> int:
        return len(self._found)

    def raise_any(self) -> None:
        """Raise DeclarationError if anything was collected."""
        if self._found:
            raise DeclarationError(tuple(self._found))


def quote(text: str) -> str:
    """``text`` in quotes, escaped and cut to a length that fits a line."""
    shown = text if len(text) <= QUOTED else text[: QUOTED - 3] + "..."
    return repr(shown)


def join(options: Iterable[object]) -> str:
    """Allowed values as a readable list; numbers and names alike."""
    return ", ".join(str(option) for option in options)
