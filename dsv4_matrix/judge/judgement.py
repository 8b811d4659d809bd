"""Judges a case: every answer against two references, and the case itself for what it would fail to notice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dsv4_matrix.judge.compare import TIGHT, Answer, Check, compare, misfit
from dsv4_matrix.judge.message import Place, failure_finding, insensitive_finding, misfit_finding
from dsv4_matrix.judge.sensitivity import effects, perturbation_names
from dsv4_matrix.judge.sight import Kind, sight_of
from dsv4_matrix.judge.truth import Oracle
from dsv4_matrix.judge.verdict import Verdict
from dsv4_matrix.repeat import PLAIN, Repeat

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4_matrix.cases.scenario import Observation, Scenario
    from dsv4_matrix.declaration.model import Case, Tolerances
    from dsv4_matrix.protocol import Reference


@dataclass(frozen=True)
class _StepFindings:
    """One step's numbers on the CPU: ``ratios`` by observation, ``effects`` ``[perturbations, T]``."""

    oracle: Oracle
    ratios: tuple[Tensor, ...]
    names: tuple[tuple[Kind, str], ...]
    effects: Tensor


def judge(
    case: Case,
    scenario: Scenario,
    observations: Sequence[Observation],
    reference: Reference,
    tolerances: Tolerances,
    *,
    backend_name: str,
    device: str,
    repeat: Repeat = PLAIN,
) -> Verdict:
    """The verdict on one case.

    Every observation must have the right types and shapes, agree in NaN and infinity positions, keep the contract
    against softmax over unquantised K, and keep the tight budget against fp64 softmax over K as stored. Every step
    must have been observed, and every perturbation that changes what a row sees must move that row by more than its
    budget.

    Args:
        case: the declared case; its id must be the scenario's.
        scenario: logical inputs, on the device of the observations.
        observations: answers in the order in which they were made.
        reference: the oracle.
        tolerances: of the declaration.
        backend_name: as given to ``--backend``; for the message.
        device: for the message, e.g. ``cpu`` or ``cuda``.
        repeat: for the message, which ends in the command that runs the case again.

    Returns:
        ``failed`` before ``insensitive`` before ``passed``. A backend's mistakes never raise.

    Raises:
        ValueError: the scenario is another case's, or an observation names a step that it does not have.
    """
    if case.id != scenario.case_id:
        raise ValueError(f"judge: scenario {scenario.case_id!r} is not of case {case.id!r}")
    for observation in observations:
        if not 0 <= observation.step < len(scenario.steps):
            raise ValueError(
                f"judge: {case.id}, leg {observation.leg!r} names step {observation.step}, "
                f"the scenario has {len(scenario.steps)}"
            )
    place = Place(scenario, backend_name, device, repeat)
    for observation in observations:
        reason = misfit(observation, scenario.steps[observation.step])
        if reason:
            return _not_passed(place, "failed", float("inf"), misfit_finding(observation, reason))
    unseen = sorted(set(range(len(scenario.steps))) - {observation.step for observation in observations})
    if unseen:
        return _not_passed(place, "failed", float("inf"), f"no answer was observed for steps {unseen}")

    with _one_thread(), torch.no_grad():
        findings = [
            _judge_step(scenario, number, [o for o in observations if o.step == number], reference, tolerances)
            for number in range(len(scenario.steps))
        ]
        return _conclude(place, findings, observations, tolerances)


def _judge_step(
    scenario: Scenario, number: int, answers: Sequence[Observation], reference: Reference, tolerances: Tolerances
) -> _StepFindings:
    """All answers of one step, rows in chunks; the truth is made once for all of them."""
    step = scenario.steps[number]
    oracle = Oracle.of(reference, step, sight_of(step, reference), tolerances.budget)
    ratios: list[list[Tensor]] = [[] for _ in answers]
    moved = []
    for rows in oracle.chunks():
        truth = oracle.truth(rows)
        for parts, answer in zip(ratios, answers, strict=True):
            tolerance = tolerances.graph if answer.graph else tolerances.eager
            parts.append(compare(Answer.of(answer, rows), truth, tolerance, tolerances.budget.cosine))
        moved.append(effects(oracle, truth))
    names = tuple(perturbation_names(oracle))
    if not moved:  # an idle step: nothing to compare, and its shapes have been checked
        empty = torch.zeros(len(Check), 0, step.q.shape[1], dtype=torch.float64)
        return _StepFindings(oracle, tuple(empty for _ in answers), names, empty.new_zeros(len(names), 0))
    # One wait for the device a step: the numbers are small, [checks, T, H] an answer.
    stacked = torch.stack([torch.cat(parts, dim=1) for parts in ratios]).cpu()
    return _StepFindings(oracle, tuple(stacked), names, torch.cat(moved, dim=1).cpu())


def _conclude(
    place: Place, findings: Sequence[_StepFindings], observations: Sequence[Observation], tolerances: Tolerances
) -> Verdict:
    margin = 0.0
    failing: list[tuple[Observation, Tensor]] = []
    for number, finding in enumerate(findings):
        answers = [observation for observation in observations if observation.step == number]
        for observation, ratios in zip(answers, finding.ratios, strict=True):
            if not ratios.numel():
                continue
            outer = float(ratios[Check.CONTRACT].max())
            margin = max(margin, float(ratios[list(TIGHT)].max()), outer if outer > 1.0 else 0.0)
            if bool((ratios[Check.CONTRACT :] > 1.0).any()) or bool((ratios[Check.SPECIAL] > 0).any()):
                failing.append((observation, ratios))
    weakest = _weakest(findings)
    if failing:
        observation, ratios = failing[0]
        also = [f'"{other.leg}" step {other.step}' for other, _ in failing[1:]]
        oracle = findings[observation.step].oracle
        told = failure_finding(oracle, observation, ratios, tolerances, observations, also)
        return _not_passed(place, "failed", margin, told, weakest)
    blind = [
        (float(finding.effects[kind, row]), finding.names[kind][1], step, row)
        for step, finding in enumerate(findings)
        for kind, row in (finding.effects <= 1.0).nonzero().tolist()
    ]
    if blind:
        shown = [(name, step, row, effect) for effect, name, step, row in sorted(blind)]
        return _not_passed(place, "insensitive", margin, insensitive_finding(shown, len(blind)), weakest)
    return Verdict("passed", margin, "", weakest=weakest)


def _not_passed(
    place: Place, outcome: str, margin: float, finding: str, weakest: Mapping[str, float] | None = None
) -> Verdict:
    """A verdict with its screen: ``finding`` alone, and in the case's message."""
    return Verdict(outcome, margin, place.message(outcome, finding), finding, weakest or {})


def _weakest(findings: Sequence[_StepFindings]) -> dict[str, float]:
    """Smallest effect of each kind that applies somewhere (a row to which it does not apply holds +inf)."""
    weakest: dict[str, float] = {}
    for finding in findings:
        if not finding.effects.shape[1]:
            continue
        for (kind, _), least in zip(finding.names, finding.effects.amin(dim=1).tolist(), strict=True):
            if least < torch.inf:
                weakest[str(kind)] = min(weakest.get(str(kind), torch.inf), least)
    return dict(sorted(weakest.items()))


@contextmanager
def _one_thread() -> Iterator[None]:
    """torch's CPU sums depend on the number of threads; a margin in a committed report must not."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
