"""What rows would have answered over keys whose packed bytes were misread: another group's scale, fp16 for bf16.

The layout is FlashMLA's (``tests/quant.py``) and SGLang's DeepSeek-V4 pool: 448 e4m3 codes in 7 groups of 64, 64 bf16
rope values, and apart from them 8 bytes a token, 7 scales and one that nothing writes. The 8th invites an index that is
one off, and both halves of the rope part are two bytes wide, so that a pointer of the wrong type reads on.
No page is looked at: a power-of-two scale moves from group to group, and bf16 bits can be read as anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4_matrix.judge.truth import Oracle, Truth

_GROUP = 64
_GROUPS = 7
_NOPE = _GROUP * _GROUPS


def misread_keys(oracle: Oracle, truth: Truth) -> list[tuple[str, Tensor]]:
    """Name and output fp64 ``[1, H, 512]`` of one row over keys that were misread; a name may come twice.

    A group past the end takes its own scale or that of the other end. Where it takes the byte that nothing writes, all
    of the answer is NaN, which says no more than that something unwritten was read.
    """
    index, step = oracle.sight.index[truth.rows], oracle.step
    seen = index[0][index[0] >= 0]
    keys, exponents = oracle.stored[seen], scale_exponents(oracle.sight.bank[seen])
    group = torch.arange(_GROUPS, device=index.device)
    misread = []
    for shift, name in ((1, "next"), (-1, "previous")):
        for taken in ((group + shift).clamp(0, _GROUPS - 1), (group + shift) % _GROUPS):
            factor = torch.exp2((exponents[:, taken] - exponents).to(torch.float64))
            nope = keys[:, :_NOPE] * factor.repeat_interleave(_GROUP, dim=1)
            misread.append((f"each group of 64 under the scale of the {name} group", nope, keys[:, _NOPE:]))
    rope = keys[:, _NOPE:].to(torch.bfloat16).view(torch.float16).to(torch.float64)
    misread.append((f"elements {_NOPE} to 511 of all keys read as fp16 instead of bf16", keys[:, :_NOPE], rope))
    own = torch.arange(len(seen), device=index.device)[None]
    return [
        (name, oracle.reference.attend(step.q[truth.rows], torch.cat(parts, 1), own, step.sink, step.softmax_scale)[0])
        for name, *parts in misread
    ]


def scale_exponents(k: Tensor) -> Tensor:
    """int32 ``[N, 7]``: e of the scale 2^e of each group of ``k`` bf16 ``[N, 512]``, ceil(log2(max(amax, 1e-4) / 448)).

    Exactly, as 448 = 0.875 * 2^9. Of a group that is not finite it says nothing.
    """
    amax = k[:, :_NOPE].to(torch.float32).reshape(-1, _GROUPS, _GROUP).abs().amax(dim=-1).clamp(min=1e-4)
    mantissa, exponent = torch.frexp(amax)
    return exponent - 9 + (mantissa > 0.875)
