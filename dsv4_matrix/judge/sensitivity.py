"""How far a mistake in one key, or in the sink, moves the output: the proof that a case can fail.

No second attention is needed: with Z = sum exp(s_i) + exp(sink), a key k of weight w = exp(s) / Z out or in gives

    out' - out = w / (1 - w) * (out - k)        out' - out = w / (1 + w) * (k - out)

and without its sink a row has out' = out * (1 + exp(sink - lse)). Effects are measured on the output alone, although
the log-sum-exp sees a missing key more easily: production reads only the output, and a mistake in P V leaves lse right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dsv4_matrix.judge.sight import NO_SINK, Edit, Kind

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4_matrix.judge.truth import Oracle, Truth


def effects(oracle: Oracle, truth: Truth) -> Tensor:
    """fp64 ``[edits + 1, t]``: effect over tight budget of each edit and, last, of the sink, on each row.

    Per row the largest over heads, of the maximum or the mean over elements; +inf where the perturbation does not
    change what the row sees. All edits at once: on a GPU the time goes into launches, not into numbers.
    """
    sink = _sink_effect(oracle, truth)[None]
    edits = oracle.sight.edits
    return torch.cat([_edit_effects(oracle, truth, edits), sink]) if edits else sink


def perturbation_names(oracle: Oracle) -> list[tuple[Kind, str]]:
    """Kind and name of each row of ``effects``."""
    return [*((edit.kind, edit.name) for edit in oracle.sight.edits), (Kind.SINK, str(Kind.SINK))]


def without_sink(oracle: Oracle, truth: Truth) -> Tensor:
    """fp64 ``[t, H, 512]``: the output as if there were no sink."""
    return truth.out * (1.0 + _sink_factor(oracle, truth))[..., None]


class _Edits:
    """Some edits on the rows of a truth.

    Attributes:
        key: fp64 ``[edits, t, 512]``, the key that comes in or goes; any key where there is none.
        factor: fp64 ``[edits, t, H]``, w / (1 - w) to drop, w / (1 + w) to add; bounded, so that a key of weight 1
            gives no NaN.
        empties: bool ``[edits, t]``, rows whose only key is dropped. Their output becomes zero, whatever 1 - w rounds
            to.
        applies: bool ``[edits, t]``, rows that the edit changes.
    """

    def __init__(self, oracle: Oracle, truth: Truth, edits: Sequence[Edit]) -> None:
        step, index = oracle.step, torch.stack([edit.key[truth.rows] for edit in edits])
        drops = torch.tensor([edit.sign < 0 for edit in edits], device=index.device)[:, None]
        self.key = oracle.stored[index.clamp(min=0)]
        # One product over all edits: queries [t, H, 512] by keys [t, 512, edits].
        scores = torch.bmm(step.q[truth.rows].to(torch.float64), self.key.permute(1, 2, 0)).mul_(step.softmax_scale)
        weight = torch.exp(scores.permute(2, 0, 1) - torch.logaddexp(truth.lse, step.sink.to(torch.float64)))
        left = torch.where(drops[..., None], (1.0 - weight).clamp(min=1e-12), 1.0 + weight)
        self.factor = weight / left
        self.empties = ((oracle.sight.index[truth.rows] >= 0).sum(dim=1) == 1) & drops
        self.applies = (index >= 0) & truth.lse.isfinite().all(dim=1)


def _edit_effects(oracle: Oracle, truth: Truth, edits: Sequence[Edit]) -> Tensor:
    made = _Edits(oracle, truth, edits)
    # Where the output becomes zero, it moves by itself: as towards a key of zeros with factor 1.
    key = torch.where(made.empties[..., None], 0.0, made.key)
    factor = torch.where(made.empties[..., None], 1.0, made.factor)
    distance = (truth.out - key[:, :, None, :]).abs_()
    return _worst(truth, factor, distance, made.applies)


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
    return torch.where(where, ratio.nan_to_num(nan=0.0, posinf=torch.inf).amax(dim=-1), torch.inf)
