"""What rows would have answered from lists that are read to their width, past their length.

FlashMLA's call leaves open what stands past ``topk_length`` and ``extra_topk_length``. While a case runs, a list that
``put_keys_beyond_lengths`` filled repeats one key of its row there, in every second column. Which one it is follows
from the slots, which the judge does not know, and so do widths; but the log-sum-exp of a head tells how often any one
key must have been counted again, and that number must be the same in every head, and one that a width gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dsv4_matrix.judge.log_sums import holds
from dsv4_matrix.judge.sight import WINDOW
from dsv4_matrix.judge.wrong_keys import columns

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4_matrix.judge.compare import Answer
    from dsv4_matrix.judge.truth import Oracle, Truth

#: Widths of lists are multiples of this, as FlashMLA reads blocks of 64 keys.
_BLOCK = 64
#: No list is longer: the entries of 1M tokens at ratio 128, and more than any selection has.
_MOST = 8192
#: Keys that are looked at more closely: of more that fit alike, none is told from the others.
_KEYS = 8

#: Column of a row's index and how often its key is counted once more.
_Again = tuple[int, int]


def ignored_lengths(oracle: Oracle, truth: Truth, answer: Answer) -> list[tuple[str, Tensor]]:
    """Name and output fp64 ``[1, H, 512]`` of one row for each list, or both, whose length may have been ignored.

    Nothing where a log-sum-exp is smaller than it should be: keys that are counted again only add to it.
    """
    tokens, entries = columns(oracle, truth)
    # Of the sum of weights, which is 1 as it should be: [N, H] what each key has of it, and [H] what was added.
    share = torch.exp(_scores(oracle, truth) - truth.lse[0])
    added = torch.expm1(answer.lse[0] - truth.lse[0])
    if not bool(added.isfinite().all()) or not bool((added > 0).any()):
        return []
    guesses: list[tuple[str, tuple[_Again, ...]]] = []
    full = len(tokens) >= WINDOW
    combined = ("the combined list of entries and window read past its length", len(tokens) + len(entries))
    of_window = [] if full else [("the window's list read past its length", len(tokens))]
    of_entries = [("the list of compressed entries read past its length", len(entries))]
    for own, lists in ((tokens, [*of_window, combined]), (entries, [*of_entries, combined])):
        for column, times in _times(share, own, added):
            guesses += [(name, ((column, times),)) for name, length in lists if _of_a_width(times, length)][:1]
    if entries and not full:
        # The window's list is as wide as the window; what it leaves of the sum is for the other one to explain.
        beyond = -(-(WINDOW - len(tokens)) // 2)
        for first in tokens:
            for column, times in _times(share, entries, added - beyond * share[first]):
                if _of_a_width(times, len(entries)):
                    guesses.append(("both lists read past their lengths", ((first, beyond), (column, times))))
    held = [(name, again) for name, again in guesses if _sums(truth, answer, share, again)]
    return [(name, _counted_again(oracle, truth, again)) for name, again in held[:_KEYS]]


def _times(share: Tensor, own: Sequence[int], added: Tensor) -> list[_Again]:
    """How often each key of ``own`` must be counted again to give ``added``; those that need not are left out."""
    if not own:
        return []
    # In the head where the key weighs most, an error of the log-sum-exp is the smallest part of the number.
    weight, head = share[list(own)].max(dim=1)
    times = (added[head] / weight).round().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).tolist()
    return [(column, int(number)) for column, number in zip(own, times, strict=True) if 1 <= number <= _MOST]


def _of_a_width(times: int, length: int) -> bool:
    """Whether every second column from ``length`` to some width, the first one included, is so many."""
    return (length + 2 * times) % _BLOCK in (0, 1)


def _sums(truth: Truth, answer: Answer, share: Tensor, again: Sequence[_Again]) -> bool:
    """Whether the log-sum-exp of every head is that with keys counted again."""
    more = torch.stack([times * share[column] for column, times in again]).sum(dim=0)
    return holds(truth, answer, truth.lse + torch.log1p(more)[None])


def _counted_again(oracle: Oracle, truth: Truth, again: Sequence[_Again]) -> Tensor:
    index, step = oracle.sight.index[truth.rows], oracle.step
    longer = torch.cat([index, *(index[:, [column] * times] for column, times in again)], dim=1)
    return oracle.reference.attend(step.q[truth.rows], oracle.stored, longer, step.sink, step.softmax_scale)[0]


def _scores(oracle: Oracle, truth: Truth) -> Tensor:
    """fp64 ``[N, H]`` of one row's index, -inf where it has no key."""
    index, step = oracle.sight.index[truth.rows][0], oracle.step
    scores = oracle.stored[index.clamp(min=0)] @ step.q[truth.rows][0].to(torch.float64).T * step.softmax_scale
    return scores.masked_fill((index < 0)[:, None], -torch.inf)
