"""Live slots where a key list is over: what a kernel reads that does not stop at the list's length.

The metadata, as SGLang's, holds -1 in every column past a length, so that over it a kernel that looks at -1 alone is
right by luck. FlashMLA's call promises less: what stands there is undefined, and lists of other makers hold leftovers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def with_keys_beyond(indices: Tensor, lengths: Tensor) -> Tensor:
    """A copy of ``indices`` int32 ``[T, 1, W]`` with a key of the row again in columns past its length.

    That of its highest slot, in the first column past ``lengths`` int32 ``[T]`` and in every second one behind it; the
    others stay as they are. A row without keys has -1 there. Part of a captured step if there is one: it reads both
    tensors anew each time, and waits for nothing.
    """
    column = torch.arange(indices.shape[-1], device=indices.device, dtype=lengths.dtype)
    past = column - lengths[:, None, None]
    return torch.where((past >= 0) & (past % 2 == 0), indices.amax(dim=-1, keepdim=True), indices)
