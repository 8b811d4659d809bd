"""How far a mistake in one key, or in the sink, moves the output: the proof that a case can fail.

No second attention is needed: with Z = sum exp(s_i) + exp(sink), a key k of weight w = exp(s) / Z out or in gives

    out' - out = w / (1 - w) * (out - k)        out' - out = w / (1 + w) * (k - out)

and without its sink a row has out' = out * (1 + exp(sink - lse)). Effects are measured on the output alone, although
the log-sum-exp sees a missing key more easily: production reads only the output, and a mistake in P V leaves lse right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dsv4_matrix.judge.sight import NO_SINK, Edit, Kind

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4_matrix.judge.truth import Oracle, Truth


def effects(oracle: Oracle, truth: Truth) -> Tensor:
    """fp64 ``[edits + 1, t]``: effect over tight budget of each edit and, last, of the sink, on each row.

    Per row the largest over heads, of the maximum or the mean over elements; +inf where the perturbation does not
    change what the row sees.
    """
    found = [_edit_effect(oracle, truth, edit) for edit in oracle.sight.edits]
    return torch.stack([*found, _sink_effect(oracle, truth)])


def perturbation_names(oracle: Oracle) -> list[tuple[Kind, str]]:
    """Kind and name of each row of ``effects``."""
    return [*((edit.kind, edit.name) for edit in oracle.sight.edits), (Kind.SINK, str(Kind.SINK))]


def applies(oracle: Oracle, truth: Truth, edit: Edit) -> Tensor:
    """bool ``[t]``: rows that ``edit`` changes."""
    return (edit.key[truth.rows] >= 0) & truth.lse.isfinite().all(dim=1)


def edited(oracle: Oracle, truth: Truth, edit: Edit) -> Tensor:
    """fp64 ``[t, H, 512]``: the output with the edit made; rows that it does not change are unchanged."""
    key = oracle.stored[edit.key[truth.rows].clamp(min=0)][:, None, :]
    changed = truth.out + (edit.sign * _factor(oracle, truth, edit))[..., None] * (key - truth.out)
    changed = torch.where(_empties(oracle, truth, edit)[:, None, None], 0.0, changed)
    return torch.where(applies(oracle, truth, edit)[:, None, None], changed, truth.out)


def without_sink(oracle: Oracle, truth: Truth) -> Tensor:
    """fp64 ``[t, H, 512]``: the output as if there were no sink."""
    return truth.out * (1.0 + _sink_factor(oracle, truth))[..., None]


def _factor(oracle: Oracle, truth: Truth, edit: Edit) -> Tensor:
    """``[t, H]``: w / (1 - w) to drop, w / (1 + w) to add; bounded, so that a key of weight 1 gives no NaN."""
    key = oracle.stored[edit.key[truth.rows].clamp(min=0)]
    q = oracle.step.q[truth.rows].to(torch.float64)
    score = torch.bmm(q, key[..., None])[..., 0] * oracle.step.softmax_scale
    weight = torch.exp(score - torch.logaddexp(truth.lse, oracle.step.sink.to(torch.float64)))
    if edit.sign > 0:
        return weight / (1.0 + weight)
    return weight / (1.0 - weight).clamp(min=1e-12)


def _edit_effect(oracle: Oracle, truth: Truth, edit: Edit) -> Tensor:
    key = oracle.stored[edit.key[truth.rows].clamp(min=0)][:, None, :]
    distance = (truth.out - key).abs_()
    emptied = _empties(oracle, truth, edit)[:, None]
    distance = torch.where(emptied[..., None], truth.out.abs(), distance)
    factor = torch.where(emptied, 1.0, _factor(oracle, truth, edit))
    return _worst(truth, factor, distance, applies(oracle, truth, edit))


def _empties(oracle: Oracle, truth: Truth, edit: Edit) -> Tensor:
    """bool ``[t]``: rows whose only key is dropped. Their output becomes zero, whatever 1 - w rounds to."""
    return ((oracle.sight.index[truth.rows] >= 0).sum(dim=1) == 1) & (edit.sign < 0)


def _sink_effect(oracle: Oracle, truth: Truth) -> Tensor:
    matters = (oracle.step.sink > NO_SINK) & truth.lse.isfinite()
    factor = torch.where(matters, _sink_factor(oracle, truth), 0.0)
    return _worst(truth, factor, truth.out.abs(), matters.any(dim=1))


def _sink_factor(oracle: Oracle, truth: Truth) -> Tensor:
    return torch.exp(oracle.step.sink.to(torch.float64) - truth.lse)


def _worst(truth: Truth, factor: Tensor, distance: Tensor, where: Tensor) -> Tensor:
    ratio = torch.maximum(
        factor * distance.amax(dim=-1) / truth.max_budget, factor * distance.mean(dim=-1) / truth.mean_budget
    )
    return torch.where(where, ratio.nan_to_num(nan=0.0, posinf=torch.inf).amax(dim=1), torch.inf)
