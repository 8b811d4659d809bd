"""Which kernel paths a deterministic run admits: those that declare it for the architecture at hand, and no others.

A backend declares its paths itself (``DETERMINISM``, a sequence of mappings, on the factory or its module); nothing is
inferred from other options. What is not declared is unknown, and unknown counts as one request at a time. No torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dsv4_matrix.overrides import Config, Forced, override
from dsv4_matrix.report.bits import Level

ATTRIBUTE = "DETERMINISM"
#: methods that decide an answer's bits
COMPUTES = ("attend", "forward", "forward_with_accumulators")


class Concurrency(StrEnum):
    """Whether a row's bits survive other rows beside it."""

    BATCH_INVARIANT = "batch_invariant"
    SERIAL_ONLY = "serial_only"  # the same bits for the same single request, no promise about batches
    UNKNOWN = "unknown"  # treated as serial_only, and named in the report


class Rule(StrEnum):
    """How a verify step accepts drafts."""

    GREEDY = "greedy"
    TARGET_ONLY = "target_only"
    CLASSIC = "classic"
    BLOCK = "block"  # reserved: arXiv:2403.10444, not built


class NotAdmittedError(ValueError):
    """A deterministic run would use a path that declares nothing of the kind on this device."""


class ConcurrencyError(RuntimeError):
    """A path that serves one request at a time was handed more."""


@dataclass(frozen=True)
class KernelPath:
    """What one path of a backend declares.

    Attributes:
        name: ``attention-packed``, ``coins``, ...
        architectures: of the device, ``sm90`` or ``interpreter``; the arithmetic of others is not spoken of.
        promise: strongest level.
        concurrency: see ``Concurrency``.
    """

    name: str
    architectures: tuple[str, ...]
    promise: Level
    concurrency: Concurrency

    @property
    def serial(self) -> bool:
        return self.concurrency is not Concurrency.BATCH_INVARIANT

    def unsupported(self, level: Level) -> str:
        """Why a case at ``level`` is not run on this path, for its line in the report; empty if it is."""
        if self.serial and level.covers(Level.BATCH):
            return f"unsupported({self.concurrency.value}): {self.name} makes no promise about batches"
        if not self.promise.covers(level):
            return f"unsupported(promise): {self.name} promises {self.promise.value}, not {level.value}"
        return ""

    def check_requests(self, requests: int) -> None:
        """At the call: ConcurrencyError if a serial path got more than one request, however it was configured."""
        if self.serial and requests != 1:
            raise ConcurrencyError(
                f"path {self.name} is {self.concurrency.value} and got {requests} requests in one call; run them one "
                "at a time"
            )


def declared(factory: Any) -> tuple[KernelPath, ...]:
    """The paths that a backend declares, () if it declares nothing.

    Raises:
        ValueError: a mistake, named with path and key; or a declaration that is another class's, of other methods.
    """
    if borrowed := _borrowed(factory):
        raise ValueError(borrowed)
    found = getattr(factory, ATTRIBUTE, None)
    if found is None:
        found = getattr(sys.modules.get(getattr(factory, "__module__", "")), ATTRIBUTE, ())
    paths = tuple(_path(entry) for entry in found or ())
    names = [path.name for path in paths]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{ATTRIBUTE}: {', '.join(twice)} declared twice")
    return paths


def _borrowed(factory: Any) -> str:
    """What is wrong with an inherited declaration: a class below the one that declares computes by itself."""
    lineage = factory.__mro__ if isinstance(factory, type) else ()
    for at, owner in enumerate(lineage):
        if ATTRIBUTE not in vars(owner):
            continue
        for heir in lineage[:at]:
            if own := [name for name in COMPUTES if name in vars(heir)]:
                return (
                    f"{ATTRIBUTE} is {owner.__name__}'s, and speaks of its {own[0]}; {heir.__name__} has its own: "
                    f"declare {ATTRIBUTE} on {heir.__name__}, what it promises and on which architectures"
                )
        break
    return ""


def admit(paths: Sequence[KernelPath], needed: Sequence[str], architecture: str) -> tuple[KernelPath, ...]:
    """The declarations of the paths that a run needs on ``architecture``.

    Raises:
        NotAdmittedError: a path that is not declared, or not for this architecture; names what would do.
    """
    by_name = {path.name: path for path in paths}
    for name in needed:
        path = by_name.get(name)
        if path is None:
            known = ", ".join(sorted(p.name for p in paths if architecture in p.architectures)) or "none"
            raise NotAdmittedError(
                f"path {name} declares no determinism; on {architecture} these do: {known}. Choose one of them, or "
                f"declare it in the backend's {ATTRIBUTE} once the gate has shown it"
            )
        if architecture not in path.architectures:
            others = ", ".join(sorted(p.name for p in paths if architecture in p.architectures)) or "none"
            raise NotAdmittedError(
                f"path {name} declares determinism on {', '.join(path.architectures)}, not on {architecture}; paths "
                f"that do: {others}"
            )
    return tuple(by_name[name] for name in needed)


def not_repeatable(rule: Rule, *, coins_seeded: bool, draft_sampled: bool, draft_seeded: bool) -> str:
    """Why a verify step's tokens may differ between two runs; empty if they must not.

    A sampled draft from the global generator changes which tokens are proposed, and classic rejection also reads their
    probabilities, so seeded coins do not help. Greedy or top-k drafts draw nothing.
    """
    if rule is Rule.BLOCK:
        raise NotImplementedError("verify rule 'block' is reserved and not built; use greedy, target_only or classic")
    if draft_sampled and not draft_seeded:
        return f"nondeterministic: {rule.value} verifies a draft sampled from the global generator"
    if rule is not Rule.GREEDY and not coins_seeded:
        return f"nondeterministic: {rule.value} draws its coins from the global generator"
    return ""


def serialise(
    config: Config, path: KernelPath, *, deterministic: bool, field: str
) -> tuple[Config, tuple[Forced, ...]]:
    """Force ``field``, requests a call, to 1 where the run is deterministic and the path is serial; else nothing."""
    if not (deterministic and path.serial):
        return config, ()
    return override(config, f"{path.name} is {path.concurrency.value}", **{field: 1})


def _path(entry: Mapping[str, Any]) -> KernelPath:
    keys = {"path", "architectures", "promise", "concurrency"}
    name = entry.get("path")
    if entry.keys() != keys or not isinstance(name, str) or not name:
        raise ValueError(f"{ATTRIBUTE}: entry {name!r} has {sorted(entry)}, expected {sorted(keys)}")
    architectures = entry["architectures"]
    if isinstance(architectures, str) or not architectures or not all(isinstance(a, str) for a in architectures):
        raise ValueError(f"{ATTRIBUTE}: {name}: architectures must be a list of names, got {architectures!r}")
    for key, kind in (("promise", Level), ("concurrency", Concurrency)):
        if entry[key] not in [member.value for member in kind]:
            raise ValueError(f"{ATTRIBUTE}: {name}: {key} {entry[key]!r} is none of {', '.join(m.value for m in kind)}")
    return KernelPath(name, tuple(architectures), Level(entry["promise"]), Concurrency(entry["concurrency"]))
