"""One environment variable and a named set of them, as frozen values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """Who wins where the user has set the variable as well."""

    FORCE = "force"  # the profile: results depend on it; another value of the user is a conflict
    DEFAULT = "default"  # the user: an opt-out that is respected and recorded


class Before(StrEnum):
    """What must not have started yet when the variable is set."""

    INTERPRETER = "interpreter"
    CUDA = "cuda"  # the first handle of a CUDA library
    NCCL = "nccl"  # the first communicator
    IMPORT = "import"  # the module that reads it
    CALL = "call"  # read at each use


@dataclass(frozen=True)
class EnvVar:
    """One variable of a profile.

    Attributes:
        name, value: as the environment holds them.
        mode: see ``Mode``.
        before: see ``Before``.
        reader: who reads it, in words; a name without a reader does nothing.
        library: pattern of the file that must hold the name as a string, ``libnccl.so*``; empty if Python reads it.
        pattern: what values are possible; the whole value must match.
        matters: whether results may depend on it. Runs whose results are compared must then agree in it.
        always_forward: workers get it even where the parent has not set it.
    """

    name: str
    value: str
    mode: Mode
    before: Before
    reader: str
    library: str = ""
    pattern: str = r".+"
    matters: bool = True
    always_forward: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Z][A-Z0-9_]*", self.name):
            raise ValueError(f"EnvVar: {self.name!r} is not an environment variable's name (A-Z, 0-9, _)")
        if not self.reader:
            raise ValueError(f"EnvVar {self.name}: no reader named; a variable that nobody reads does nothing")
        if not self.possible(self.value):
            raise ValueError(f"EnvVar {self.name}: value {self.value!r} does not match {self.pattern!r}")

    def possible(self, value: str) -> bool:
        return bool(value) and re.fullmatch(self.pattern, value) is not None


@dataclass(frozen=True)
class Profile:
    """Variables under one name; applied later, a profile wins over earlier ones and the record says so."""

    name: str
    variables: tuple[EnvVar, ...]

    def __post_init__(self) -> None:
        names = [variable.name for variable in self.variables]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"profile {self.name}: {', '.join(twice)} occur twice")

    def replacing(self, **values: str) -> Profile:
        """A copy with other values of its variables. KeyError for a variable that it does not have."""
        if unknown := sorted(values.keys() - {variable.name for variable in self.variables}):
            raise KeyError(f"profile {self.name} has no {', '.join(unknown)}")
        changed = tuple(
            EnvVar(**{**vars(variable), "value": values.get(variable.name, variable.value)})
            for variable in self.variables
        )
        return Profile(self.name, changed)
