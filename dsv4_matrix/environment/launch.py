"""Starts a fresh interpreter in a prepared environment: only from outside does every variable have an effect."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

from dsv4_matrix.environment.apply import Applied, apply
from dsv4_matrix.environment.profile import Profile

#: How the child learns what its parent decided: JSON of the settings. Its absence means that nobody prepared it.
RECORD = "DSV4_MATRIX_ENVIRONMENT"


@dataclass(frozen=True)
class Launch:
    """A command and the environment that it is to run in."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    applied: Applied


def prepare(
    argv: Sequence[str],
    profiles: Sequence[Profile],
    environ: Mapping[str, str] | None = None,
    *,
    strict: bool = False,
) -> Launch:
    """The command ``python argv...`` under ``profiles``; errors as ``apply``. Nothing is started."""
    applied = apply(profiles, os.environ if environ is None else environ, strict=strict)
    record = {
        "profiles": [profile.name for profile in profiles],
        "settings": [asdict(setting) for setting in applied.settings],
        "not_deterministic": list(applied.not_deterministic),
    }
    told = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return Launch((sys.executable, *argv), {**applied.environ, RECORD: told}, applied)


def launch(
    argv: Sequence[str],
    profiles: Sequence[Profile],
    environ: Mapping[str, str] | None = None,
    *,
    strict: bool = False,
) -> NoReturn:
    """Replace this process by ``python argv...`` under ``profiles``. Does not return."""
    command = prepare(argv, profiles, environ, strict=strict)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command.argv[0], list(command.argv), dict(command.environ))
