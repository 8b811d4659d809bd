"""What the judge says about one case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Verdict:
    """The outcome of a case.

    Attributes:
        outcome: ``passed``; ``failed`` (an answer is out of budget); ``insensitive`` (every answer is in budget, but
            the case would not notice a perturbation that applies to it).
        margin: worst error/budget over every tight check of every observation, the outer contract included where it
            is broken; above 1, or inf, when failed.
        message: one screen for a person; empty if passed.
        finding: the message without the case's name above and its seed below, for a screen that has its own.
        weakest: smallest effect/budget of each kind of perturbation that applies, by its name; above 1 unless
            insensitive. Empty if the answers could not be compared at all.
    """

    outcome: str
    margin: float
    message: str
    finding: str = ""
    weakest: Mapping[str, float] = field(default_factory=dict)
