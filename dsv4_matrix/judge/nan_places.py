"""Where an answer is NaN and must not be, and what that speaks for: poison that was read, or arithmetic.

Everything that nothing may read is NaN: unused slots, page tails, scale bytes, pad rows, and outputs before they are
written. But 0/0, -inf - -inf and an exp that overflows give NaN as well. Poison has an address, so that it hits rows
without regard to how many keys they see; arithmetic goes wrong in all rows that are alike in that, or in every one. An
infinite log-sum-exp comes from scores that are none of them NaN, and a right one from the right scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dsv4_matrix.judge.compare import Answer
from dsv4_matrix.judge.log_sums import is_off
from dsv4_matrix.judge.sight import WINDOW
from dsv4_matrix.judge.wrong_bytes import nan_as_e5m2

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4_matrix.cases.scenario import Observation
    from dsv4_matrix.judge.truth import Oracle, Truth

_ARITHMETIC = "0/0 or -inf - -inf"
_DEAD = "a slot that holds no live key"
_UNWRITTEN = f"{_DEAD} or a scale byte that nothing wrote"
#: Its score does not count, but its value is multiplied.
_MASKED = f"of 0 x NaN from {_DEAD}"
#: What rows may have in common; beside each that only they are NaN, and of what that is.
_NO_KEYS, _ALL, _NO_ENTRIES, _SHORT = "no keys", "all", "no entries", "short window"
_TOLD = {
    _NO_KEYS: f"in every row without keys and no other, as of {_ARITHMETIC}",
    _NO_ENTRIES: f"in every row without compressed entries and no other, as of {_ARITHMETIC} over them or of {_DEAD}",
    _SHORT: f"in every row whose window is not full and no other, as of {_ARITHMETIC} where it ends or of {_DEAD}",
}


def nan_places(oracle: Oracle, observation: Observation, rows: Sequence[int]) -> list[tuple[str, int]]:
    """What to say of each of ``rows`` that is NaN in its output or its log-sum-exp and must not be.

    Rows that see a key which is not finite are left out: NaN is what they owe.
    """
    index = oracle.sight.index
    settled = ~((~oracle.stored.isfinite().all(dim=1))[index.clamp(min=0)] & (index >= 0)).any(dim=1)
    out, lse = observation.out.isnan().flatten(1), observation.lse.isnan()
    somewhere, lse_somewhere = out.any(dim=1) & settled, lse.any(dim=1) & settled
    wanted = [row for row in rows if bool(somewhere[row] | lse_somewhere[row])]
    if not wanted:
        return []
    alike = _alike(oracle, out.all(dim=1) & settled, somewhere, settled)
    lse_alike = _alike(oracle, lse.all(dim=1) & settled, lse_somewhere, settled)
    found = []
    for row in wanted:
        truth = oracle.truth(slice(row, row + 1))
        answer = Answer.of(observation, truth.rows)
        if bool(somewhere[row]):
            found.append((_infinite_lse(truth, answer) or _of_output(oracle, truth, answer, alike), row))
        else:
            found.append((_of_lse(lse_alike), row))
    return found


def _alike(oracle: Oracle, whole: Tensor, somewhere: Tensor, settled: Tensor) -> str:
    """What the rows that are NaN, wholly or not, bool ``[T]``, have in common with no other; empty if nothing."""
    present, window = oracle.sight.index >= 0, oracle.sight.window
    tokens, entries = present[:, :window].sum(dim=1), present[:, window:].sum(dim=1)
    if not torch.equal(whole, somewhere) or not bool(whole.any()):
        return ""
    # Every row before those of a kind: where all are of one kind, it is not that which tells them.
    kinds = {
        _NO_KEYS: tokens + entries == 0,
        _ALL: settled,
        _NO_ENTRIES: entries == 0,
        _SHORT: tokens < WINDOW,
    }
    return next((kind for kind, rows in kinds.items() if torch.equal(whole, rows & settled)), "")


def _infinite_lse(truth: Truth, answer: Answer) -> str:
    """Of a row whose heads with NaN all have an infinite log-sum-exp that they do not owe; else empty."""
    lse = answer.lse[0][answer.out[0].isnan().any(dim=1)]
    if not bool((lse.isinf() & truth.lse[0, 0].isfinite()).all()):
        return ""
    if bool((lse < 0).all()):
        return "NaN beside an lse of -inf, as of 0/0 where no key was counted"
    return "NaN beside an lse of inf, as of an exp that overflowed or of 0/0 where no key was counted"


def _of_output(oracle: Oracle, truth: Truth, answer: Answer, alike: str) -> str:
    nan, scored = answer.out[0].isnan(), not is_off(truth, answer)
    heads, elements = nan.any(dim=1), nan.any(dim=0)
    if bool(nan.all()):
        if alike in _TOLD:
            return f"NaN {_TOLD[alike]}"
        if alike == _ALL and scored:
            return f"NaN in every row beside the right lse, as of 0/0 without keys, of an unwritten output or {_MASKED}"
        if alike == _ALL:
            e5m2 = bool(answer.lse.isnan().all()) and nan_as_e5m2(oracle, truth)
            also = ", of e4m3 codes read as e5m2" if e5m2 else ""
            return f"NaN in every row, as from {_UNWRITTEN}{also} or of arithmetic that all share"
        if scored:
            where = f"NaN beside the right lse, as of an unwritten output or {_MASKED}"
        else:
            where = f"NaN, as from {_UNWRITTEN}"
    elif bool(nan[heads].all()):
        where = f"NaN in {int(heads.sum())} whole heads, as of an output, a query or a sink that nothing wrote"
    elif bool(nan[:, elements].all()):
        at = elements.nonzero()[:, 0].tolist()
        where = f"NaN in elements {at[0]} to {at[-1]} of every head, as from a part of a key that nothing wrote"
    else:
        where = "NaN in part, as of an output that nothing wrote"
    return f"poison reached the output: {where}"


def _of_lse(alike: str) -> str:
    if alike == _NO_KEYS:
        return f"lse NaN {_TOLD[alike]}"
    if alike == _ALL:
        return "lse NaN in every row, as of arithmetic or of one that nothing wrote"
    return "poison reached the lse: NaN, as of one that nothing wrote"
