"""What the two runs of a gate differ in: all that a result must not depend on, on purpose and by declaration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from zlib import crc32

#: How a run learns its plan and the name that it must write back; both are made by the gate.
PLAN_VARIABLE = "DSV4_MATRIX_GATE_PLAN"
RUN_VARIABLE = "DSV4_MATRIX_GATE_RUN"


@dataclass(frozen=True)
class RunPlan:
    """One run of a gate.

    Attributes:
        name: ``A`` or ``B``.
        workers: processes.
        reverse: cases in descending order of their ids.
        hash_seed: ``PYTHONHASHSEED``.
        locale, timezone: ``LC_ALL`` and ``TZ``.
        composition: the batches around each needle: ``alone``, ``among`` for all others, or names of kinds of batches
            (``cases.turns``) with commas between.
        fillers: enters the seed of all rows but the needle.
        device: entry of CUDA_VISIBLE_DEVICES; empty for all that the user gave.
    """

    name: str
    workers: int
    reverse: bool
    hash_seed: str
    locale: str
    timezone: str
    composition: str
    fillers: int
    device: str = ""

    def environ(self, run: str) -> dict[str, str]:
        """Variables of this run named ``run``; ``PYTHONHASHSEED`` goes through the profile."""
        plan = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        pinned = {"CUDA_VISIBLE_DEVICES": self.device} if self.device else {}
        return {"LC_ALL": self.locale, "TZ": self.timezone, PLAN_VARIABLE: plan, RUN_VARIABLE: run, **pinned}

    @classmethod
    def observed(cls, environ: Mapping[str, str]) -> RunPlan | None:
        """The plan that this process runs under, None outside a gate."""
        told = environ.get(PLAN_VARIABLE)
        return None if told is None else cls(**json.loads(told))


PLAN_A = RunPlan("A", 1, False, "0", "C", "UTC", "alone", 0)
PLAN_B = RunPlan("B", 4, True, "1", "C.UTF-8", "Asia/Kolkata", "among", 1)


def sampled(ids: Iterable[str], one_in: int) -> tuple[str, ...]:
    """About one id in ``one_in``, the same ones every day and on every machine; all for 1. Sorted."""
    if one_in < 1:
        raise ValueError(f"sampled: one in {one_in}; give 1 for all cases, or more")
    return tuple(sorted(case for case in ids if crc32(case.encode()) % one_in == 0))
