"""Which keys peaked queries are aimed at: those that a wrong backend would drop, or see too many."""

from __future__ import annotations

import numpy as np

from dsv4_matrix.cases.content import Bank
from dsv4_matrix.cases.layout import WINDOW, IntArray

_ABSENT = -1


def critical_keys(
    bank: Bank,
    ratio: int,
    request: IntArray,
    positions: IntArray,
    selection: IntArray | None,
    generator: np.random.Generator,
) -> IntArray:
    """Rows of the bank that each query row is aimed at, ``[T, K]``, -1 where a row has no such key."""
    base, seen = bank.token_base[request], np.minimum(positions + 1, WINDOW)
    rows = len(positions)
    newest = base + positions
    targets = [
        newest,
        newest - seen + 1,
        np.where(positions >= WINDOW, newest - WINDOW, _ABSENT),
        newest + 1,
        newest - generator.integers(0, seen),
    ]
    if ratio:
        base, complete = len(bank.tokens) + bank.entry_base[request], (positions + 1) // ratio
        some = complete > 0
        if selection is None:
            chosen = generator.integers(0, np.maximum(complete, 1))
        else:
            width = np.minimum(complete, selection.shape[1])
            chosen = selection[np.arange(rows), generator.integers(0, np.maximum(width, 1))]
        targets += [
            np.where(some, base + complete - 1, _ABSENT),
            np.where(some, base, _ABSENT),
            base + complete,
            np.where(some, base + chosen, _ABSENT),
        ]
        if selection is not None:
            left_out = generator.integers(0, np.maximum(complete, 1))
            missing = some & ~(selection == left_out[:, None]).any(1)
            targets.append(np.where(missing, base + left_out, _ABSENT))
    return np.stack(targets, 1)


def dealt(targets: IntArray, heads: int) -> IntArray:
    """Deal each row's present targets to its peaked heads in turn, starting at another one in each row."""
    present = targets != _ABSENT
    ordered = np.take_along_axis(targets, np.argsort(~present, axis=1, kind="stable"), 1)
    turn = np.arange(heads)[None, :] + np.arange(len(targets))[:, None]
    return np.asarray(np.take_along_axis(ordered, turn % present.sum(1, keepdims=True), 1))
