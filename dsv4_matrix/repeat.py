"""The command under a failure that runs this one case again: copied, it must mean what the first run meant.

It names what decides the case's inputs, its answers or its judge: matrix, reference and draw, for the gate its level
and devices too. Options that divide, bound, record or refuse a run (``-n``, ``--shard``, ``--timeout``, ``--report``,
``--require-gpu`` and their like) decide none of these, and are left out unless the failure is theirs: the limit that
ended the case, or the one worker (``-n 1``) without which a death would be the end of the command and not an outcome.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

#: Between a case id and the number of a draw from another seed; no declared id has this character.
DRAW = "#"


@dataclass(frozen=True)
class Repeat:
    """What the command says beside the case and its backend.

    Attributes:
        options: with their values, as they were given; empty where defaults stood.
        command: of ``dsv4-matrix``: ``run`` or ``gate``.
    """

    options: tuple[str, ...] = ()
    command: str = "run"

    def line(self, case_id: str, backend: str) -> str:
        """The command as a POSIX shell takes it; for a draw of a case, with as many seeds as reach it."""
        declared, _, draw = case_id.partition(DRAW)
        drawn = ("--seeds", str(int(draw) + 1)) if draw else ()
        words = ("dsv4-matrix", self.command, "--cells", declared, "--backend", backend, *self.options, *drawn)
        return shlex.join(words)

    def also(self, given: Mapping[str, str | None]) -> Repeat:
        """With those options of ``given`` that have a value."""
        return replace(self, options=self.options + as_words(given))

    def of(self, command: str) -> Repeat:
        """The same of another command of ``dsv4-matrix``."""
        return replace(self, command=command)


#: Of a run by defaults.
PLAIN = Repeat()


def as_words(given: Mapping[str, str | None]) -> tuple[str, ...]:
    """Options that have a value, and the values, as words of a command line."""
    return tuple(word for option, value in given.items() if value is not None for word in (option, value))


def path_seen_from(here: Path, folder: Path, path: str) -> str:
    """How a command in ``here`` names ``path``, which was written down in ``folder``; as it was written if it can."""
    return path if folder == here or os.path.isabs(path) else os.path.relpath(folder / path, here)
