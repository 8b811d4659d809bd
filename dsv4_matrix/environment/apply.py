"""Applies profiles to an environment: pure, by rule, with a record of every decision."""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from dsv4_matrix.environment.profile import Before, EnvVar, Mode, Profile


class ConflictError(ValueError):
    """The user has set a forced variable to another value, in a run that must not guess which one is meant."""


class EnvironmentValueError(ValueError):
    """A variable is set to something that its reader would misread; an empty string above all."""


class TooLateError(RuntimeError):
    """The variable's reader has started already, so setting it now does nothing."""


@dataclass(frozen=True)
class Setting:
    """One decision: ``name`` has ``value`` by ``profile``; ``replaced`` says what that put aside, and whose."""

    name: str
    value: str
    profile: str
    replaced: tuple[str, ...] = ()


@dataclass(frozen=True)
class Applied:
    """An environment and how it came about.

    Attributes:
        environ: the whole new environment.
        settings: sorted by name.
        not_deterministic: opt-outs that the user kept, in words; such a run proves nothing.
    """

    environ: Mapping[str, str]
    settings: tuple[Setting, ...]
    not_deterministic: tuple[str, ...]


def apply(profiles: Sequence[Profile], environ: Mapping[str, str], *, strict: bool = False) -> Applied:
    """A new environment; ``environ`` stays as it is.

    Forced variables get the profile's value; a different one of the user is replaced and recorded. Defaults keep what
    the user set, unless it is not a possible value. Later profiles win over earlier ones.

    Args:
        profiles: in order.
        environ: what the user has set.
        strict: a user's different value of a forced variable is an error, as in the gate.

    Raises:
        ConflictError: in a strict run.
        EnvironmentValueError: a value that the reader would misread. An empty one counts as unset where forced, but as
            a mistake where it is a default: ``== "1"`` would read it as off.
    """
    new, settings, opted_out = dict(environ), [], []
    for variable, owner, losers in _composed(profiles):
        was = environ.get(variable.name)
        replaced = list(losers)
        value = variable.value
        if variable.mode is Mode.FORCE and was and was != value:
            if strict:
                raise ConflictError(
                    f"{variable.name} is set to {was!r} but profile {owner} needs {value!r} ({variable.reader}); unset "
                    "it, results depend on it"
                )
            replaced.append(f"{was} of the user")
        if variable.mode is Mode.DEFAULT and was is not None:
            if not variable.possible(was):
                raise EnvironmentValueError(
                    f"{variable.name} is set to {was!r}, expected {variable.pattern} ({variable.reader}); "
                    f"set it, or leave it unset for {value!r}"
                )
            value, owner = was, "the user" if was != value else owner
            if was != variable.value and variable.matters:
                opted_out.append(f"{variable.name}={was} instead of {variable.value}: {variable.reader}")
        new[variable.name] = value
        settings.append(Setting(variable.name, value, owner, tuple(replaced)))
    return Applied(new, tuple(sorted(settings, key=lambda setting: setting.name)), tuple(opted_out))


def forward(profiles: Sequence[Profile], environ: Mapping[str, str]) -> dict[str, str]:
    """What a worker that does not inherit the environment is given: names that are set and not empty, no others.

    An empty string is a value to its reader (``int("")`` fails), so it does not travel. Variables that are always
    forwarded get the profile's value where the parent has none.
    """
    given = {}
    for variable, _, _ in _composed(profiles):
        value = environ.get(variable.name) or (variable.value if variable.always_forward else "")
        if value:
            given[variable.name] = value
    return given


def apply_in_process(
    profiles: Sequence[Profile],
    environ: MutableMapping[str, str],
    *,
    loaded: Container[str] | None = None,
    strict: bool = False,
) -> Applied:
    """``apply`` to the running process, where that still has an effect.

    Args:
        environ: ``os.environ``; changed.
        loaded: modules that are imported; by default ``sys.modules``. torch stands for CUDA, NCCL and its imports.

    Raises:
        TooLateError: a variable would change although its reader runs; nothing is changed then.
    """
    loaded = sys.modules if loaded is None else loaded
    applied = apply(profiles, environ, strict=strict)
    late = {Before.INTERPRETER} | ({Before.CUDA, Before.NCCL, Before.IMPORT} if "torch" in loaded else set())
    for variable, owner, _ in _composed(profiles):
        value = applied.environ[variable.name]
        if variable.before in late and environ.get(variable.name) != value:
            raise TooLateError(
                f"{variable.name}={value} (profile {owner}) must be set before {_STARTED[variable.before]}; start the "
                "run with dsv4-matrix, which sets it before the interpreter exists"
            )
    environ.update(applied.environ)
    return applied


_STARTED = {
    Before.INTERPRETER: "this interpreter started",
    Before.CUDA: "torch was imported and CUDA libraries may have started",
    Before.NCCL: "torch was imported and NCCL may have started",
    Before.IMPORT: "the module that reads it was imported",
}


def _composed(profiles: Sequence[Profile]) -> tuple[tuple[EnvVar, str, tuple[str, ...]], ...]:
    """Each variable once, as the last profile has it, with that profile's name and what earlier ones wanted."""
    last: dict[str, tuple[EnvVar, str, tuple[str, ...]]] = {}
    for profile in profiles:
        for variable in profile.variables:
            before = last.get(variable.name)
            losers = () if before is None else (*before[2], f"{before[0].value} of profile {before[1]}")
            last[variable.name] = (variable, profile.name, losers)
    return tuple(last.values())
