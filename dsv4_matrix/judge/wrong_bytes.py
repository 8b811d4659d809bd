"""What rows would have answered over keys whose packed bytes were misread: another scale, fp16 for bf16, e5m2 for e4m3.

The layout is FlashMLA's (``tests/quant.py``) and SGLang's DeepSeek-V4 pool: 448 e4m3 codes in 7 groups of 64, 64 bf16
rope values, and apart from them 8 bytes a token, 7 scales and one that nothing writes. The 8th invites an index that is
one off, and both halves of the rope part are two bytes wide, so that a pointer of the wrong type reads on. FP8 has two
forms of one byte: FlashAttention and Triton name them ``fp8e4nv`` and ``fp8e5``, and a cast of raw bytes takes either.
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

E5M2 = f"elements 0 to {_NOPE - 1} of all keys read as e5m2 instead of e4m3"


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
    for nope in _as_e5m2(keys[:, :_NOPE], exponents):
        misread.append((E5M2, nope, keys[:, _NOPE:]))
    own = torch.arange(len(seen), device=index.device)[None]
    outputs = [
        (name, oracle.reference.attend(step.q[truth.rows], torch.cat(parts, 1), own, step.sink, step.softmax_scale)[0])
        for name, *parts in misread
    ]
    # All NaN fits whatever is all NaN; ``nan_places`` says where that is, and of what it may be.
    return [(name, output) for name, output in outputs if not bool(output.isnan().all())]


def nan_as_e5m2(oracle: Oracle, truth: Truth) -> bool:
    """Whether one row's answer is all NaN if codes are read as e5m2, where those of 384 and above are no numbers."""
    index, step = oracle.sight.index[truth.rows], oracle.step
    seen = index[0][index[0] >= 0]
    keys = oracle.stored[seen]
    nope, _ = _as_e5m2(keys[:, :_NOPE], scale_exponents(oracle.sight.bank[seen]))
    own, keys = torch.arange(len(seen), device=index.device)[None], torch.cat([nope, keys[:, _NOPE:]], dim=1)
    out, lse = oracle.reference.attend(step.q[truth.rows], keys, own, step.sink, step.softmax_scale)
    return bool(out.isnan().all() & lse.isnan().all())


def _as_e5m2(nope: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """fp64 ``[N, 448]``: what e4m3 codes under scales 2^exponents are as e5m2; by its rules, and without its specials.

    A conversion by shifts and one product gives numbers to the codes of infinity and NaN too.
    """
    scale = torch.exp2(exponents.to(torch.float64)).repeat_interleave(_GROUP, dim=1)
    codes = (nope / scale).to(torch.float32).to(torch.float8_e4m3fn)
    bits = codes.view(torch.uint8).to(torch.int32)
    sign = 1.0 - 2.0 * (bits >> 7)
    exponent, fraction = ((bits >> 2) & 31), (bits & 3).to(torch.float64) / 4
    size = (fraction + (exponent > 0)) * torch.exp2((exponent.clamp(min=1) - 15).to(torch.float64))
    return codes.view(torch.float8_e5m2).to(torch.float64) * scale, sign * size * scale


def scale_exponents(k: Tensor) -> Tensor:
    """int32 ``[N, 7]``: e of the scale 2^e of each group of ``k`` bf16 ``[N, 512]``, ceil(log2(max(amax, 1e-4) / 448)).

    Exactly, as 448 = 0.875 * 2^9. Of a group that is not finite it says nothing.
    """
    amax = k[:, :_NOPE].to(torch.float32).reshape(-1, _GROUPS, _GROUP).abs().amax(dim=-1).clamp(min=1e-4)
    mantissa, exponent = torch.frexp(amax)
    return exponent - 9 + (mantissa > 0.875)
