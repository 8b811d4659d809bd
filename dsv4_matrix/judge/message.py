"""The one screen that a person sees when a case fails: what was found, and around it which case that was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dsv4_matrix.judge.compare import TIGHT, Answer, Check
from dsv4_matrix.judge.distance import absolute_error, signed_mean
from dsv4_matrix.judge.explain import explanations, name_rows
from dsv4_matrix.judge.heads import name_heads
from dsv4_matrix.repeat import PLAIN, Repeat

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4_matrix.cases.scenario import Observation, Scenario
    from dsv4_matrix.declaration.model import Tolerance, Tolerances
    from dsv4_matrix.judge.truth import Oracle, Truth


@dataclass(frozen=True)
class Place:
    """Which case on which backend: what every message says first and last, once."""

    scenario: Scenario
    backend_name: str
    device: str
    repeat: Repeat = PLAIN

    def message(self, outcome: str, finding: str) -> str:
        """The screen around ``finding``, whose first line goes on in the headline."""
        lines = [
            f"{self.scenario.case_id}: {outcome} on {self.backend_name} ({self.device}), {finding}",
            _line("seed", str(self.scenario.seed)),
            _line("run", self.repeat.line(self.scenario.case_id, self.backend_name)),
        ]
        return "\n".join(lines)


def misfit_finding(observation: Observation, reason: str) -> str:
    """A wrong type, shape, dtype or device: nothing else can be said."""
    return "\n".join([f'leg "{observation.leg}", step {observation.step}', _line("answer", reason)])


def insensitive_finding(blind: Sequence[tuple[str, int, int, float]], cases: int) -> str:
    """``blind`` holds (perturbation, step, row, effect/budget) of the weakest, ``cases`` how many there are in all."""
    lines = ["its answers are in budget, but it would not notice"]
    for name, step, row, effect in blind[:8]:
        lines.append(_line("blind to", f"{name}: step {step}, row {row}, effect is {effect:.2g} x its budget"))
    lines.append(_line("in all", f"{cases} (perturbation, row) pairs at or below 1"))
    lines.append(_line("next", "draw q so that these keys carry weight in some head, or shorten the context"))
    return "\n".join(lines)


def failure_finding(
    oracle: Oracle,
    observation: Observation,
    ratios: Tensor,
    tolerances: Tolerances,
    others: Sequence[Observation],
    also: Sequence[str],
) -> str:
    """The worst place of one failing answer, its budget, counts and likely cause.

    Args:
        oracle: of the observation's step.
        observation: the answer, of the right shapes.
        ratios: fp64 ``[len(Check), T, H]`` on the CPU, as ``compare`` gives.
        tolerances: of the declaration.
        others: all answers of the case, for stale rows.
        also: other legs that fail.
    """
    tolerance = tolerances.graph if observation.graph else tolerances.eager
    bad = ratios > 1.0
    bad[Check.SPECIAL] = ratios[Check.SPECIAL] > 0
    bad_rows = bad.any(dim=0).any(dim=1).nonzero()[:, 0].tolist()
    check = next(c for c in Check if bool(bad[c].any()))
    row, head = divmod(int(ratios[check].argmax()), ratios.shape[2])
    truth = oracle.truth(slice(row, row + 1))
    answer = Answer.of(observation, truth.rows)

    step = oracle.step
    where = f"row {row} (request {int(step.request[row])}, position {int(step.positions[row])}), head {head}"
    lines = [
        f'leg "{observation.leg}", step {observation.step}, ratio {step.ratio}',
        *_worst(check, where, head, answer, truth, tolerances, tolerance),
        _line("over", _counts(bad)),
        _line("NaN/inf", f"{int(ratios[Check.SPECIAL].sum())} positions differ"),
        _line("cosine", _cosine(ratios, tolerances.budget.cosine)),
        _line("failing", name_rows(bad_rows) + f" of {ratios.shape[1]}"),
    ]
    if some := name_heads(_bad_heads(bad), ratios.shape[2]):
        lines.append(_line("heads", f"{some}, of {ratios.shape[2]}"))
    hints = explanations(oracle, observation, others, bad_rows)
    lines.append(_line("agrees", "with: " + "; ".join(hints) if hints else "with no known mistake"))
    if bool((absolute_error(truth.out, truth.contract) > tolerance.atol + tolerance.rtol * truth.contract.abs()).any()):
        lines.append(_line("note", "here quantisation alone leaves the contract: the case's keys are too large"))
    if also:
        lines.append(_line("also", f"{len(also)} more answers fail: " + ", ".join(also[:4])))
    return "\n".join(lines)


def _worst(
    check: Check,
    where: str,
    head: int,
    answer: Answer,
    truth: Truth,
    tolerances: Tolerances,
    tolerance: Tolerance,
) -> list[str]:
    """Tensor, index, got, want and how the allowance came about, for the check that is explained."""
    budget = tolerances.budget
    if check is Check.LSE or (check is Check.SPECIAL and _lse_is_special(answer, truth, head)):
        got, want = float(answer.lse[0, head]), float(truth.lse[0, head])
        return [
            _line("tensor", f"lse; worst at {where}"),
            _line("got", f"{got:.9g}   want {want:.9g} (natural log, the sink not counted; +inf without keys)"),
            _budget(
                abs(got - want),
                float(truth.lse_budget[0, head]),
                f"{budget.lse_factor:g} x baseline error + {budget.lse_rounding:g} x 2^-23 x max(1, |lse|)",
            ),
        ]
    outer = check is Check.CONTRACT
    reference = (truth.contract if outer else truth.out)[0, head]
    error = absolute_error(answer.out[0, head], reference)
    element = int((error / (tolerance.atol + tolerance.rtol * reference.abs()) if outer else error).argmax())
    got, want = float(answer.out[0, head, element]), float(reference[element])
    keys = "unquantised" if outer else "dequantised"
    lines = [
        _line("tensor", f"out; worst at {where}, element {element}"),
        _line("got", f"{got:.6g}   want {want:.6g} (fp64 oracle, {keys} K)"),
    ]
    factor, mean_term = f"{budget.baseline_factor:g} x", f"{budget.mean_rounding:g} x 2^-7 x mean|out|"
    if outer:
        allowed = tolerance.atol + tolerance.rtol * abs(want)
        lines.append(_budget(abs(got - want), allowed, f"{tolerance.atol:g} + {tolerance.rtol:g} x |want|"))
    elif check is Check.MEAN:
        parts = f"{factor} mean error of the low-precision baseline + {mean_term}"
        lines.append(_budget(float(error.mean()), float(truth.mean_budget[0, head]), parts, "mean error"))
    elif check is Check.BIAS:
        parts = f"{factor} bias of the low-precision baseline + {mean_term}, over all heads"
        bias = float(signed_mean(answer.out, truth.out)[0])
        lines.append(_budget(bias, float(truth.bias_budget[0]), parts, "signed mean error (negative: too small)"))
    else:
        baseline, peak = float(truth.baseline_max[0, head]), float(truth.peak[0, head])
        parts = f"{factor} {baseline:.3g} (low-precision baseline) + {budget.rounding:g} x 2^-7 x {peak:.3g} (max|out|)"
        lines.append(_budget(float(error.max()), float(truth.max_budget[0, head]), parts))
    return lines


def _budget(error: float, allowed: float, parts: str, what: str = "error") -> str:
    return _line("budget", f"{what} {error:.3g}, allowed {allowed:.3g} = {parts}")


def _lse_is_special(answer: Answer, truth: Truth, head: int) -> bool:
    """Whether only the log-sum-exp differs in kind there."""
    outputs = absolute_error(answer.out[0, head], truth.out[0, head])
    return not bool((outputs == torch.inf).any())


def _counts(bad: Tensor) -> str:
    pairs = bad.shape[1] * bad.shape[2]
    by_head = (Check.CONTRACT, Check.MAX, Check.MEAN, Check.LSE)
    each = ", ".join(f"{check.name.lower()} {int(bad[check].sum())}" for check in by_head)
    of_rows = ", ".join(
        f"{check.name.lower()} {int(bad[check].any(dim=1).sum())}" for check in (Check.BIAS, Check.COSINE)
    )
    return f"{each} of {pairs} (row, head) pairs; {of_rows} of {bad.shape[1]} rows"


def _bad_heads(bad: Tensor) -> list[int]:
    """Heads that fail by themselves, in any row; bias and cosine are of a whole row."""
    by_head = [check for check in Check if check not in (Check.BIAS, Check.COSINE)]
    return [int(head) for head in bad[by_head].any(dim=0).any(dim=0).nonzero()[:, 0]]


def _cosine(ratios: Tensor, bound: float) -> str:
    worst = float(ratios[Check.COSINE].max()) * bound
    margin = float(ratios[list(TIGHT)].max())
    return f"1 - cos = {worst:.3g} in the worst row, allowed {bound:g}; worst error/budget {margin:.3g}"


def _line(label: str, text: str) -> str:
    return f"  {label:<9}{text}"
