"""One answer against the truth: every check as error over allowance, per (row, head), with no wait for the device."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from dsv4_matrix.judge.distance import absolute_error, cosine_difference, finite_part, over, signed_mean

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4_matrix.cases.scenario import Observation, Step
    from dsv4_matrix.declaration.model import Tolerance
    from dsv4_matrix.judge.truth import Truth


class Check(IntEnum):
    """Rows of what ``compare`` returns, in the order in which a failure is explained."""

    SPECIAL = 0  # number of NaN, infinity and empty-row positions that differ; anything above 0 fails
    CONTRACT = 1  # worst |got - want| / (atol + rtol |want|) against unquantised K
    MAX = 2  # largest error over its tight budget
    MEAN = 3  # mean error over its tight budget
    BIAS = 4  # signed mean error of the whole row over its budget, the same for all heads
    COSINE = 5  # 1 - cosine of the whole row over its bound, the same for all heads
    LSE = 6  # log-sum-exp error over its tight budget


#: The checks whose ratio is the margin; the contract is an outer bound and SPECIAL has no scale.
TIGHT = (Check.MAX, Check.MEAN, Check.BIAS, Check.COSINE, Check.LSE)


@dataclass(frozen=True)
class Answer:
    """An observation cut to the rows of a truth, in fp64."""

    out: Tensor
    lse: Tensor

    @classmethod
    def of(cls, observation: Observation, rows: slice) -> Answer:
        return cls(observation.out[rows].to(torch.float64), observation.lse[rows].to(torch.float64))


def misfit(observation: Observation, step: Step) -> str:
    """Why an answer cannot be compared at all (type, shape, dtype, device), or an empty string."""
    expected = {"out": (tuple(step.q.shape), torch.bfloat16), "lse": (tuple(step.q.shape[:2]), torch.float32)}
    for name, (shape, dtype) in expected.items():
        tensor = getattr(observation, name)
        want = f"{str(dtype).removeprefix('torch.')} {list(shape)} on {step.q.device.type}"
        if not isinstance(tensor, torch.Tensor):
            return f"{name}: expected a tensor, {want}; got {type(tensor).__name__}"
        got = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device.type}"
        if got != want:
            return f"{name}: expected {want}; got {got}"
    return ""


def compare(answer: Answer, truth: Truth, tolerance: Tolerance, cosine: float) -> Tensor:
    """fp64 ``[len(Check), t, H]``: each check's error over what is allowed, +inf where nothing is."""
    error = absolute_error(answer.out, truth.out)
    special = (error == torch.inf).sum(dim=-1) + (absolute_error(answer.lse, truth.lse) == torch.inf)
    # The contract bounds what is finite as stored: a key with an infinity is NaN in the cache, unquantised it is not.
    contract = absolute_error(answer.out, truth.contract) / (tolerance.atol + tolerance.rtol * truth.contract.abs())
    contract = finite_part(contract, truth.out)
    got, want = finite_part(answer.out, truth.out), finite_part(truth.out, truth.out)
    ratios = [
        special.to(torch.float64),
        contract.nan_to_num(nan=0.0, posinf=torch.inf).amax(dim=-1),
        over(error.amax(dim=-1), truth.max_budget),
        over(error.mean(dim=-1), truth.mean_budget),
        over(signed_mean(got, want).abs(), truth.bias_budget)[:, None].expand(special.shape),
        over(cosine_difference(got, want), cosine)[:, None].expand(special.shape),
        over(absolute_error(answer.lse, truth.lse), truth.lse_budget),
    ]
    return torch.stack(ratios)
