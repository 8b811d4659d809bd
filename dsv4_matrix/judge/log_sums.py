"""The log-sum-exp of an answer: whether it is off, and in which form it holds one that a mistake would give."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from dsv4_matrix.judge.distance import absolute_error

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4_matrix.judge.compare import Answer
    from dsv4_matrix.judge.truth import Truth


def is_off(truth: Truth, answer: Answer) -> bool:
    """Whether some log-sum-exp is out of budget."""
    return bool((absolute_error(answer.lse, truth.lse) > truth.lse_budget).any())


def other_forms(lse: Tensor, sink: Tensor) -> list[tuple[str, Tensor]]:
    """Name and value ``[t, H]`` of each form in which a kernel may wrongly hand over the right ``lse`` ``[t, H]``."""
    return [
        ("lse in base 2", lse / math.log(2.0)),
        ("lse with the sink counted in", torch.logaddexp(lse, sink.to(torch.float64))),
        ("lse negated", -lse),
        ("lse -inf instead of +inf for a row without keys", torch.where(lse.isinf(), -torch.inf, lse)),
    ]


def holds(truth: Truth, answer: Answer, lse: Tensor) -> bool:
    """Whether the answer's log-sum-exp is ``lse`` fp64 ``[t, H]`` in every head, within two budgets.

    A budget grows with the size of what it is for, so those of the truth are widened where ``lse`` is larger.
    """
    larger = (lse.abs() / truth.lse.abs().clamp(min=1.0)).nan_to_num(nan=1.0, posinf=1.0).clamp(min=1.0)
    return bool((absolute_error(answer.lse, lse) <= 2 * truth.lse_budget * larger + 1e-6).all())


def holds_in_some_form(truth: Truth, answer: Answer, lse: Tensor, sink: Tensor) -> bool:
    """The same of ``lse`` as it should be handed over, or in one of ``other_forms``: two mistakes at once."""
    return any(holds(truth, answer, form) for form in (lse, *(form for _, form in other_forms(lse, sink))))
