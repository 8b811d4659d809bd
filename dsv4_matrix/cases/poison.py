"""What stands where nothing may be read: NaN in every part of the packed format, and garbage in pad rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

#: As e4m3 a NaN, as UE8M0 a NaN scale, twice as bf16 a NaN.
POISON_BYTE = 0xFF
#: Entry ids that a pad row's selection holds: far out of range in both directions, and one that may exist.
_GARBAGE_IDS = (2**31 - 1, -(2**31), 2**30, -2, 0)


def poison_pools(buffers: Mapping[str, Tensor]) -> None:
    """Fill every byte of the backend's caches, dummy page and page tails included."""
    for buffer in buffers.values():
        buffer.fill_(POISON_BYTE)


def garbage_selection(rows: int, width: int, device: str) -> Tensor:
    """int32 ``[rows, width]`` for pad rows: nothing of it may be dereferenced."""
    ids = torch.tensor(_GARBAGE_IDS, dtype=torch.int32)
    return ids.repeat(-(-width // len(ids)))[:width].repeat(rows, 1).to(device)


def poison_allocator(like: tuple[tuple[tuple[int, ...], torch.dtype], ...], device: str) -> None:
    """Leave NaN in the memory that the allocator hands out next, so that an output nobody writes is not zero."""
    for shape, dtype in like:
        torch.full(shape, float("nan"), dtype=dtype, device=device)
