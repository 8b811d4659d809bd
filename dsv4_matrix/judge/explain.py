"""What a wrong answer looks like: known mistakes that reproduce it, which is what a kernel author wants to read first.

A hypothesis is named for the rows on which the answer lies close to it and clearly closer to it than to the truth.
Runs on failures only, on a few failing rows, so it may wait for the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dsv4_matrix.judge.compare import Answer
from dsv4_matrix.judge.distance import absolute_error
from dsv4_matrix.judge.log_sums import holds, is_off, other_forms
from dsv4_matrix.judge.nan_places import nan_places
from dsv4_matrix.judge.sensitivity import without_sink
from dsv4_matrix.judge.truth import EPS_BF16
from dsv4_matrix.judge.wrong_bytes import misread_keys
from dsv4_matrix.judge.wrong_keys import both_lists_short, edited, other_scales, short_lists
from dsv4_matrix.judge.wrong_lengths import ignored_lengths
from dsv4_matrix.judge.wrong_scores import captured_lengths, other_softmax_scales

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4_matrix.cases.scenario import Observation
    from dsv4_matrix.judge.truth import Oracle, Truth

_ROWS = 16
_NAMES = 4
_CHUNKS = 8
_TRUNCATED = 0.85


def explanations(
    oracle: Oracle, observation: Observation, others: Sequence[Observation], bad_rows: Sequence[int]
) -> list[str]:
    """Sentences such as ``window 127 (rows 3, 5)``, most telling first; empty if nothing known fits.

    At most four names, and last what no name speaks for: a name for some rows is not one for all.

    Args:
        oracle: of the step that was observed.
        observation: the failing answer, of the right shapes and dtypes.
        others: other answers of the case, to recognise stale rows.
        bad_rows: rows out of budget; the first 16 are looked at.
    """
    found: dict[str, list[int]] = {}
    for row in bad_rows[:_ROWS]:
        truth = oracle.truth(slice(row, row + 1))
        answer = Answer.of(observation, truth.rows)
        outputs = _output_hypotheses(oracle, truth, answer, of_graph=observation.graph)
        for name in dict.fromkeys(outputs + _lse_hypotheses(oracle, truth, answer)):
            found.setdefault(name, []).append(row)
        name = _stale(observation, others, row)
        if name:
            found.setdefault(name, []).append(row)
    of_all = (nan_places(oracle, observation, bad_rows[:_ROWS]), _misplaced(oracle, observation, bad_rows[:_ROWS]))
    for name, row in itertools.chain(*of_all):
        found.setdefault(name, []).append(row)
    names = [f"{name} ({name_rows(rows)})" for name, rows in sorted(found.items(), key=lambda item: -len(item[1]))]
    named = {row for rows in found.values() for row in rows}
    if not names:
        return []
    told = names[:_NAMES]
    if unnamed := [row for row in bad_rows[:_ROWS] if row not in named]:
        told.append(f"no known mistake in {name_rows(unnamed)}")
    if len(bad_rows) > _ROWS:
        told.append(f"{len(bad_rows) - _ROWS} more not looked at")
    return told


def name_rows(rows: Sequence[int], most: int = 8) -> str:
    """``row 3``, ``rows 3, 5`` or ``rows 0, 1, 2 and 61 more``."""
    shown = ", ".join(map(str, rows[:most]))
    more = f" and {len(rows) - most} more" if len(rows) > most else ""
    return f"{'row' if len(rows) == 1 else 'rows'} {shown}{more}"


def _output_hypotheses(oracle: Oracle, truth: Truth, answer: Answer, *, of_graph: bool) -> list[str]:
    candidates = [(edit.name, edited(oracle, truth, edit)) for edit in oracle.sight.edits]
    candidates.append(("sink left out", without_sink(oracle, truth)))
    candidates.append(("zeros, as for a row without keys", torch.zeros_like(truth.out)))
    candidates.append(("heads in reverse order", truth.out.flip(1)))
    _, heads, width = truth.out.shape
    candidates.append(("[heads, 512] written as [512, heads]", truth.out.mT.reshape(1, heads, width)))
    candidates += short_lists(oracle, truth)
    if is_off(truth, answer):
        # Keys of another size give other scores; under the right ones the output alone is too large or too small.
        candidates += other_scales(oracle, truth)
        candidates += misread_keys(oracle, truth)
        candidates += other_softmax_scales(oracle, truth, answer)
        candidates += ignored_lengths(oracle, truth, answer)
    names = [name for name, output in candidates if _fits(truth, answer.out, output)]
    if not names:
        # Two mistakes at once look like one of them where the other weighs little, so that one is told first.
        names = [name for name, output in both_lists_short(oracle, truth) if _fits(truth, answer.out, output)]
    if not names and of_graph and is_off(truth, answer):
        # A short row that lacks one key also sees as many as some capture: what can be said of any answer goes before.
        captured = captured_lengths(oracle, truth, answer)
        names = [name for name, output in captured if _fits(truth, answer.out, output)]
    if _truncates(truth, answer):
        names.append("rounded towards zero instead of to nearest")
    return names


def _truncates(truth: Truth, answer: Answer) -> bool:
    """Whether nearly every element is the oracle's cut to bf16, where rounding to nearest would cut only half.

    An element that bf16 holds exactly, as of a row with one key, says nothing about rounding.
    """
    cut = (truth.out.to(torch.float32).view(torch.int32) & ~0xFFFF).view(torch.float32)
    return bool(((answer.out == cut) & (cut != truth.out)).to(torch.float64).mean() > _TRUNCATED)


def _lse_hypotheses(oracle: Oracle, truth: Truth, answer: Answer) -> list[str]:
    if not is_off(truth, answer):
        return []
    far = absolute_error(answer.lse, truth.lse).max()
    return [
        name
        for name, lse in other_forms(truth.lse, oracle.step.sink)
        if holds(truth, answer, lse) and bool(absolute_error(answer.lse, lse).max() < 0.5 * far)
    ]


def _misplaced(oracle: Oracle, observation: Observation, bad_rows: Sequence[int]) -> list[tuple[str, int]]:
    """Rows that hold the answer of another row of the same step, one of its first chunks of rows.

    Not those whose own output it is, as of rows without keys, nor NaN, which has no owner.
    """
    found = []
    wrong = []
    for row in bad_rows:
        truth = oracle.truth(slice(row, row + 1))
        error = absolute_error(Answer.of(observation, truth.rows).out, truth.out).amax(dim=-1)
        if bool((error > truth.max_budget).any()) and not bool(observation.out[row].isnan().any()):
            wrong.append(row)
    for rows in oracle.chunks()[:_CHUNKS]:
        others = oracle.truth(rows)
        for row in wrong:
            answer = Answer.of(observation, slice(row, row + 1))
            distance = absolute_error(answer.out, others.out).amax(dim=-1)
            close = (distance <= 2 * others.max_budget).all(dim=1).nonzero()[:, 0] + rows.start
            found += [(f"the answer of row {other}", row) for other in close.tolist() if other != row]
    return found


def _stale(observation: Observation, others: Sequence[Observation], row: int) -> str:
    """Names the other answer whose row this one repeats bit for bit."""
    out = observation.out[row]
    for other in others:
        # The same step on another leg has the same answer when it is right: only another step's row is stale.
        if other.step == observation.step or not isinstance(other.out, torch.Tensor):
            continue
        if other.out.shape[1:] != out.shape or other.out.dtype != out.dtype:
            continue
        same = (other.out.to(out.device) == out).flatten(1).all(dim=1).nonzero()
        if len(same) and bool((out != 0).any()):
            return f'bit for bit row {int(same[0])} of leg "{other.leg}", step {other.step}'
    return ""


def _fits(truth: Truth, got: Tensor, hypothesis: Tensor) -> bool:
    """Whether ``got`` is near ``hypothesis`` (four budgets, as its own is not known) and nearer than to the truth."""
    allowed = 4 * truth.max_budget + EPS_BF16 * hypothesis.abs().amax(dim=-1)
    near = absolute_error(got, hypothesis).amax(dim=-1)
    far = absolute_error(got, truth.out).amax(dim=-1)
    return bool((near <= allowed).all()) and float(near.max()) < 0.5 * float(far.max())
