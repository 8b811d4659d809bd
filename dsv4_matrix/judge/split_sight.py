"""Whether a step's bits would show keys that are summed in other parts: what a batch-dependent split does to a row.

Flash decoding in fp32 on the step's own rows: once over all keys together, once over them in a few parts that are then
joined, as a kernel does whose split follows the batch. A case in which few heads differ proves nothing by equal bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dsv4_matrix.judge.sight import sight_of

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4_matrix.cases.scenario import Step
    from dsv4_matrix.protocol import Reference

#: What a wrong kernel may make of the keys of one row: this many parts instead of one.
PARTS = (2, 3, 4, 5)
#: Mean share of (row, head) whose fp32 log-sum-exp or bf16 output must differ; a row has 16 heads or more.
LEAST = 0.05
_ROWS = 4


def split_sight(step: Step, reference: Reference) -> float:
    """Share of (row, head) of the step's last rows whose compared bits another split changes, on average over PARTS."""
    last = slice(max(0, step.q.shape[0] - _ROWS), None)
    sight = sight_of(step, reference)
    index = sight.index[last]
    # Present keys first, in the order in which the row lists them: parts are cut from what a row really has.
    order = torch.argsort((index < 0).to(torch.int8), dim=1, stable=True)
    index = torch.gather(index, 1, order)[:, : max(1, int((index >= 0).sum(1).max()))]
    keys = reference.quantise_dequantise(sight.bank).to(torch.float32)[index.clamp(min=0)]
    scores = torch.einsum("thd,tnd->thn", step.q[last].float(), keys) * step.softmax_scale
    scores = scores.masked_fill((index < 0)[:, None, :], -torch.inf)
    whole = _flash(scores, keys, step.sink, 1)
    shares = []
    for parts in PARTS:
        split = _flash(scores, keys, step.sink, parts)
        shares.append(float(((split[1] != whole[1]) | (split[0] != whole[0]).any(-1)).float().mean()))
    return sum(shares) / len(shares)


def _flash(scores: Tensor, keys: Tensor, sink: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """``(out bf16 [t, H, 512], lse fp32 [t, H])`` from ``parts`` partial softmaxes joined in order."""
    width = -(-scores.shape[2] // parts)
    top = scores.new_full(scores.shape[:2], -torch.inf)
    total, joined = torch.zeros_like(top), keys.new_zeros(*top.shape, keys.shape[2])
    for first in range(0, scores.shape[2], width):
        part = scores[:, :, first : first + width]
        peak = torch.maximum(top, part.amax(-1))
        scale = torch.where(peak.isinf(), 0.0, torch.exp(top - peak))
        weights = torch.where(peak.isinf()[..., None], 0.0, torch.exp(part - peak[..., None]))
        total = total * scale + weights.sum(-1)
        joined = joined * scale[..., None] + torch.einsum("thn,tnd->thd", weights, keys[:, first : first + width])
        top = peak
    lse = top + torch.log(total)
    return (joined / (total + torch.exp(sink - top))[..., None]).to(torch.bfloat16), lse
