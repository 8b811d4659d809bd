"""Reads step metrics out of training logs and compares them as verl's two-run script does, to compare with it only.

Its rules are kept, weaknesses included, so that its verdicts can be reproduced: values are compared as fp32 with ``==``
(+0 equals -0, NaN differs from itself, differences below fp32 are lost), only the number of steps must agree, and the
last line of a step counts. The gate compares bits of canonical reports instead.

A step line holds ``step``, optional spaces, ``:``, a number and an optional ``-``; ``step`` must not follow a word
character or ``:``, so ``global_step:7`` is none but ``val-step:7`` is. What follows is split at `` - ``, each piece at
its first ``:``; pieces without one are dropped.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

TRAINING_KEY = "critic/rewards/mean"

_STEP = re.compile(r"(?<![\w:])step\s*:\s*(\d+)\s*-?\s*(.*)")
_WRAPPED = re.compile(r"np\.(?:float|int|uint|bool)\w*\((.*)\)")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


class ScrapeError(ValueError):
    """A log without what is to be compared."""


@dataclass(frozen=True)
class Comparison:
    """Rewards of two logs by step order, and whether the script would call them aligned."""

    aligned: bool
    key: str
    left: tuple[float, ...]
    right: tuple[float, ...]


def scrape(text: str) -> dict[int, dict[str, str]]:
    """Metrics as text by step, in the order of first appearance; a later line of a step replaces the earlier."""
    steps: dict[int, dict[str, str]] = {}
    for line in text.splitlines():
        if found := _STEP.search(line):
            pieces = (piece.split(":", 1) for piece in found.group(2).split(" - ") if ":" in piece)
            steps[int(found.group(1))] = {name.strip(): value for name, value in pieces}
    return steps


def number(text: str) -> float:
    """A metric's value: a plain or numpy-wrapped number, else the first number in the text, else NaN."""
    text = text.strip()
    if wrapped := _WRAPPED.fullmatch(text):
        text = wrapped.group(1).strip()
    try:
        return float(text)
    except ValueError:
        found = _NUMBER.search(text)
        return float(found.group()) if found else float("nan")


def reward_key(keys: Iterable[str]) -> str:
    """Which metric is compared: the training mean, else a validation mean, else any reward mean.

    ScrapeError if there is none.
    """
    keys = list(keys)
    means = [key for key in keys if "reward" in key and "mean" in key]
    for candidates in ([key for key in keys if key == TRAINING_KEY], [k for k in means if k.startswith("val")], means):
        if candidates:
            return candidates[0]
    raise ScrapeError(f"no reward mean among {', '.join(keys) or 'no metrics'}")


def compare_logs(left: str, right: str) -> Comparison:
    """The script's verdict on two logs. ScrapeError if either has no step line or no reward."""
    steps = []
    for name, text in (("first", left), ("second", right)):
        steps.append(scrape(text))
        if not steps[-1]:
            raise ScrapeError(f"no step line in the {name} log")
    key = reward_key(name for metrics in steps[0].values() for name in metrics)
    values = [_series(run, key) for run in steps]
    aligned = len(values[0]) == len(values[1]) and all(a == b for a, b in zip(*values, strict=True))
    return Comparison(aligned, key, *values)


def _series(steps: Mapping[int, Mapping[str, str]], key: str) -> tuple[float, ...]:
    """fp32 values of ``key``, as many as steps have it, by ascending step."""
    found = tuple(_fp32(number(metrics[key])) for _, metrics in sorted(steps.items()) if key in metrics)
    if not found:
        raise ScrapeError(f"no step has {key}")
    return found


def _fp32(value: float) -> float:
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        rounded = float("inf") if value > 0 else float("-inf")
    return rounded
