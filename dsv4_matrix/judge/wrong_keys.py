"""What rows would have answered over wrong keys: one too few or too many, lists cut short or missing, another scale.

By attention over those keys. ``sensitivity`` needs none, but its closed forms lose the answer where one key has all
the weight; they tell how large an effect is, not what a backend would have answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4_matrix.judge.sight import Edit
    from dsv4_matrix.judge.truth import Oracle, Truth

#: Elements of a key that are stored under a scale; the others are stored as they are.
_SCALED = 448


def columns(oracle: Oracle, truth: Truth) -> tuple[list[int], list[int]]:
    """Columns of the row's index that hold a token, and those that hold an entry, in the list's order."""
    present = (oracle.sight.index[truth.rows][0] >= 0).nonzero()[:, 0].tolist()
    window = oracle.sight.window
    return [at for at in present if at < window], [at for at in present if at >= window]


def edited(oracle: Oracle, truth: Truth, edit: Edit) -> Tensor:
    """fp64 ``[t, H, 512]``: the output with the edit made; rows that it does not change are unchanged."""
    index, key = oracle.sight.index[truth.rows], edit.key[truth.rows, None]
    index = torch.where(index == key, -1, index) if edit.sign < 0 else torch.cat([index, key], dim=1)
    return _attended(oracle, truth, oracle.stored, index)


def short_lists(oracle: Oracle, truth: Truth) -> list[tuple[str, Tensor]]:
    """Name and output fp64 ``[1, H, 512]`` of one row over one of its two lists, or with entries cut short.

    Nothing of a row without entries, which has one list. Edits of the sight drop the entries with the smallest and the
    largest number; the C4 list is in the indexer's order, so its last one is neither.
    """
    tokens, entries = columns(oracle, truth)
    found = []
    if entries:
        found.append(("no compressed entry seen", _without(oracle, truth, entries)))
        found.append(("no token of the window seen", _without(oracle, truth, tokens)))
        found.append(("last compressed entry of the list missing", _without(oracle, truth, entries[-1:])))
    if len(tokens) < len(entries) - 1:
        name = "compressed entries cut to the length of the window's list"
        found.append((name, _without(oracle, truth, entries[len(tokens) :])))
    return found


def both_lists_short(oracle: Oracle, truth: Truth) -> list[tuple[str, Tensor]]:
    """Name and output fp64 ``[1, H, 512]`` of one row, both of whose lists are one key short at once.

    Two answers, since a window is listed from its oldest token on or from its newest; none of a row without entries.
    """
    tokens, entries = columns(oracle, truth)
    if not tokens or not entries:
        return []
    index = oracle.sight.index[truth.rows][0]
    ends = {min(tokens, key=lambda at: int(index[at])): "oldest", max(tokens, key=lambda at: int(index[at])): "newest"}
    return [
        (
            f"both lists one key short, the window's {end} token and the last compressed entry",
            _without(oracle, truth, [at, entries[-1]]),
        )
        for at, end in ends.items()
    ]


def other_scales(oracle: Oracle, truth: Truth) -> list[tuple[str, Tensor]]:
    """Name and output fp64 ``[1, H, 512]`` of one row over keys twice or half as large, wholly or below element 448."""
    index = oracle.sight.index[truth.rows]
    keys = oracle.stored[index[0].clamp(min=0)]
    own = torch.where(index >= 0, torch.arange(index.shape[1], device=index.device), -1)
    found = []
    for factor, size in ((2.0, "twice"), (0.5, "half")):
        scaled = torch.cat([keys[:, :_SCALED] * factor, keys[:, _SCALED:]], dim=1)
        found.append((f"all keys {size} as large", _attended(oracle, truth, keys * factor, own)))
        found.append(
            (
                f"elements 0 to {_SCALED - 1} of all keys {size} as large, as under scales of another bias",
                _attended(oracle, truth, scaled, own),
            )
        )
    return found


def _without(oracle: Oracle, truth: Truth, columns: list[int]) -> Tensor:
    index = oracle.sight.index[truth.rows].clone()
    index[0, columns] = -1
    return _attended(oracle, truth, oracle.stored, index)


def _attended(oracle: Oracle, truth: Truth, keys: Tensor, index: Tensor) -> Tensor:
    step = oracle.step
    return oracle.reference.attend(step.q[truth.rows], keys, index, step.sink, step.softmax_scale)[0]
