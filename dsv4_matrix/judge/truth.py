"""The oracle's answers for some rows of a step, and the budgets that its data gives.

After FlashAttention's and attention-gym's tests: a kernel may err twice as much as an independent implementation of the
same precision, plus a rounding term, both measured against fp64. The budget is per (row, head), so that a head with
small values is not judged by its neighbour's size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dsv4_matrix.judge.distance import finite_part, signed_mean

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4_matrix.cases.scenario import Step
    from dsv4_matrix.declaration.model import Budget
    from dsv4_matrix.judge.sight import Sight
    from dsv4_matrix.protocol import Reference

EPS_BF16 = 2.0**-7
EPS_FP32 = 2.0**-23
#: One fp64 tensor of outputs, of which up to twenty are alive at once: bounds a GPU's memory, and fits a CPU's cache.
_CHUNK_BYTES = {"cpu": 2 << 20, "cuda": 64 << 20}


@dataclass(frozen=True)
class Truth:
    """Oracle and budgets for ``t`` rows; all fp64.

    Attributes:
        rows: which rows of the step.
        out: ``[t, H, 512]``, softmax over dequantised K.
        lse: ``[t, H]``.
        contract: ``[t, H, 512]``, softmax over unquantised K.
        peak: ``[t, H]``, max |out| over the elements.
        baseline_max: ``[t, H]``, max |baseline - out|.
        max_budget: ``[t, H]``, bound on the largest error over the 512 elements.
        mean_budget: ``[t, H]``, bound on the mean absolute error.
        bias_budget: ``[t]``, bound on the signed mean error of all heads, formed as the mean's.
        lse_budget: ``[t, H]``.
    """

    rows: slice
    out: Tensor
    lse: Tensor
    contract: Tensor
    peak: Tensor
    baseline_max: Tensor
    max_budget: Tensor
    mean_budget: Tensor
    bias_budget: Tensor
    lse_budget: Tensor


@dataclass(frozen=True)
class Oracle:
    """A reference applied to one step: makes the truth of any rows on demand."""

    reference: Reference
    step: Step
    sight: Sight
    stored: Tensor  # fp64 [M, 512], the bank as a kernel reads it
    budget: Budget

    @classmethod
    def of(cls, reference: Reference, step: Step, sight: Sight, budget: Budget) -> Oracle:
        return cls(reference, step, sight, reference.quantise_dequantise(sight.bank), budget)

    def chunks(self) -> list[slice]:
        """Rows to be judged together, so that memory stays bounded whatever the batch."""
        rows, heads, width = self.step.q.shape
        allowed = _CHUNK_BYTES["cpu" if self.step.q.is_cpu else "cuda"]
        count = max(1, allowed // (8 * heads * width))
        return [slice(first, min(first + count, rows)) for first in range(0, rows, count)]

    def truth(self, rows: slice) -> Truth:
        """Oracle, contract and baseline of ``rows``."""
        q, index = self.step.q[rows], self.sight.index[rows]
        sink, scale, budget = self.step.sink, self.step.softmax_scale, self.budget
        out, lse = self.reference.attend(q, self.stored, index, sink, scale)
        contract, _ = self.reference.attend(q, self.sight.bank, index, sink, scale)
        low, low_lse = self.reference.attend_low_precision(q, self.stored, index, sink, scale)

        # Budgets come from what is finite; a NaN or an infinity has no size, only a position.
        low, settled = finite_part(low.to(torch.float64), out), finite_part(out, out)
        error, size = (low - settled).abs_(), settled.abs()
        bias = signed_mean(low, settled).abs()
        peak, baseline_max = size.amax(dim=-1), error.amax(dim=-1)
        lse_error = torch.where(low_lse == lse, 0.0, (low_lse.to(torch.float64) - lse).abs())
        lse_size = torch.where(lse.isinf(), 1.0, lse.abs().clamp(min=1.0))
        return Truth(
            rows=rows,
            out=out,
            lse=lse,
            contract=contract,
            peak=peak,
            baseline_max=baseline_max,
            max_budget=budget.baseline_factor * baseline_max + budget.rounding * EPS_BF16 * peak,
            mean_budget=budget.baseline_factor * error.mean(dim=-1)
            + budget.mean_rounding * EPS_BF16 * size.mean(dim=-1),
            bias_budget=budget.baseline_factor * bias + budget.mean_rounding * EPS_BF16 * size.mean(dim=(1, 2)),
            lse_budget=budget.lse_factor * lse_error + budget.lse_rounding * EPS_FP32 * lse_size,
        )
