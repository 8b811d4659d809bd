"""How far one tensor of answers is from another, by each of the measures that budgets and checks share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def finite_part(values: Tensor, want: Tensor) -> Tensor:
    """``values`` where ``want`` is finite, 0 elsewhere: what sums over elements may see."""
    return torch.where(want.isfinite(), values, 0.0)


def absolute_error(got: Tensor, want: Tensor) -> Tensor:
    """|got - want|; 0 where both are the same infinity or both NaN, +inf where only one is special."""
    same = (got == want) | (got.isnan() & want.isnan())
    return torch.where(same, 0.0, (got - want).abs_()).nan_to_num_(nan=torch.inf, posinf=torch.inf)


def signed_mean(got: Tensor, want: Tensor) -> Tensor:
    """``[t]``: mean over heads and elements of the error towards larger magnitude; negative if ``got`` is too small.

    Rounding to nearest averages out, truncation (half a bit towards zero) does not, although each element stays
    within twice an honest error.
    """
    return ((got - want) * want.sign()).mean(dim=(1, 2)).nan_to_num_(nan=torch.inf)


def cosine_difference(got: Tensor, want: Tensor) -> Tensor:
    """``[t]``: 1 - cosine over all heads and elements of a row; 0 for equal rows, 1 where the cosine is undefined."""
    dot = (got * want).sum(dim=(1, 2))
    norms = (got * got).sum(dim=(1, 2)).sqrt_() * (want * want).sum(dim=(1, 2)).sqrt_()
    equal = (got == want).all(dim=2).all(dim=1)
    return torch.where(equal, 0.0, (1.0 - dot / norms).abs_().nan_to_num_(nan=1.0, posinf=1.0))


def over(error: Tensor, allowed: Tensor | float) -> Tensor:
    """error / allowed, where no error is 0 even if nothing is allowed, and an error without a budget is +inf."""
    return torch.where(error == 0, 0.0, error / allowed).nan_to_num_(nan=torch.inf, posinf=torch.inf)
