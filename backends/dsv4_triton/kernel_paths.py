"""Which attention kernel serves the calls of a device, asked of ``choice`` itself, so that a report can tell.

``kernels.json`` beside this module declares the same for every architecture, for readers that cannot import torch.
"""

from __future__ import annotations

import torch

from dsv4_triton.arguments import KeyList
from dsv4_triton.choice import Choice, choose
from dsv4_triton.geometry import HEAD_DIM, NUM_HEADS, PAGE_SIZE, TOKEN_BYTES, page_stride
from dsv4_triton.target import target_of

#: Calls by the method of the backend that makes them.
CALLS = {"attend": "attention", "attend_prefill": "sparse-prefill"}


def kernel_paths(device: str) -> tuple[dict[str, str], ...]:
    """``{"call", "kernel", "why"}`` for attention over pages and over the sparse-prefill workspace on ``device``.

    Of tensors as this backend's own pools and a contiguous query have them. A call is one for all head counts where
    they share a kernel, else one for each, ``attention/64``.
    """
    return kernels_of_target(target_of(torch.device(device)).name)


def kernels_of_target(target: str) -> tuple[dict[str, str], ...]:
    """The same for a target by name. Nothing is computed: the tensors have shapes and strides only."""
    found = []
    for call, keys in zip(CALLS.values(), (_pages(), _workspace()), strict=True):
        chosen = {heads: _choice(target, heads, keys) for heads in NUM_HEADS}
        if len({choice.kernel for choice in chosen.values()}) == 1:
            reasons = dict.fromkeys(choice.reason for choice in chosen.values())
            found.append((call, chosen[NUM_HEADS[0]].kernel, "; ".join(reasons)))
        else:
            found += [(f"{call}/{heads}", choice.kernel, choice.reason) for heads, choice in chosen.items()]
    return tuple({"call": call, "kernel": kernel, "why": why} for call, kernel, why in found)


def _choice(target: str, heads: int, keys: KeyList) -> Choice:
    q = torch.empty(1, 1, heads, HEAD_DIM, dtype=torch.bfloat16, device="meta")
    return choose(target, q, keys, None, HEAD_DIM**-0.5, q)


def _pages() -> KeyList:
    buffer = torch.empty(2, page_stride(PAGE_SIZE), dtype=torch.uint8, device="meta")
    pages = buffer[:, : PAGE_SIZE * TOKEN_BYTES].view(2, PAGE_SIZE, 1, TOKEN_BYTES)
    return KeyList(pages, _indices(), None)


def _workspace() -> KeyList:
    return KeyList(torch.empty(2, HEAD_DIM, dtype=torch.bfloat16, device="meta"), _indices(), None)


def _indices() -> torch.Tensor:
    return torch.empty(1, 1, 128, dtype=torch.int32, device="meta")
