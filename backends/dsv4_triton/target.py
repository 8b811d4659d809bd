"""What kernels are shaped for: one frozen value per GPU architecture, read from the device, never tuned by timing.

Bits of a result may depend on these values, so they are a function of the device model alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from dsv4_triton.numerics import INTERPRETED


@dataclass(frozen=True)
class Target:
    """Tiles and abilities of one architecture.

    Attributes:
        name: ``sm90``, ``gfx950``, ``interpreter`` ...
        shared_limit: bytes of shared memory that one program may use.
        block_h: query heads a program; fewer heads are padded with masked rows.
        block_n: keys a step of the attention loop.
        num_warps: of the attention kernel.
        num_stages: software pipeline depth of the attention loop.
        packed_decode: whether e4m3 is decoded in packed PTX (sm_80 and later) or by the portable twin.
        hardware_fp8: whether fp32 -> e4m3 is one instruction (sm_89 and later).
        store_rows: rows a program of the store and unpack kernels.
        parts: how many parts the 512 columns are worked on in, 5 or 1.
    """

    name: str
    shared_limit: int
    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    packed_decode: bool
    hardware_fp8: bool
    store_rows: int
    parts: int = 5


KIB = 1024
#: sm_100 keeps to 32 heads on purpose: 64 would use tensor memory, and Triton lays the accumulators out in 544 of its
#: 512 columns, upon which the kernel becomes a trap.
TARGETS = {
    "sm80": Target("sm80", 163 * KIB, 32, 32, 8, 1, True, False, 8),
    "sm86": Target("sm86", 99 * KIB, 32, 32, 8, 1, True, False, 8),
    "sm89": Target("sm89", 99 * KIB, 32, 32, 8, 1, True, True, 8),
    "sm90": Target("sm90", 227 * KIB, 64, 64, 8, 2, True, True, 8),
    "sm100": Target("sm100", 227 * KIB, 32, 64, 8, 1, True, True, 8),
    "sm120": Target("sm120", 99 * KIB, 32, 32, 8, 1, True, True, 8),
    "gfx950": Target("gfx950", 160 * KIB, 32, 32, 8, 1, False, False, 8),
    "interpreter": Target("interpreter", 0, 64, 64, 1, 1, False, False, 64, 1),
}


def nvidia_target(major: int, minor: int) -> Target:
    """The target of a compute capability: the nearest listed one whose shared memory and instructions it has."""
    if major >= 12:
        return TARGETS["sm120"]
    if major in (10, 11):
        return TARGETS["sm100"]
    if major == 9:
        return TARGETS["sm90"]
    if (major, minor) == (8, 9):
        return TARGETS["sm89"]
    if (major, minor) in ((8, 0), (8, 7)):
        return TARGETS["sm80"]
    if major == 8:
        return TARGETS["sm86"]
    raise RuntimeError(
        f"dsv4_triton: compute capability {major}.{minor} is not supported: bf16 needs 8.0 or later. "
        "Use a newer GPU, or TRITON_INTERPRET=1 on the CPU."
    )


@cache
def _gpu_target(index: int) -> Target:
    if torch.version.hip:
        return TARGETS["gfx950"]
    return nvidia_target(*torch.cuda.get_device_capability(index))


def target_of(device: torch.device) -> Target:
    """The target of a tensor's device.

    Raises RuntimeError if kernels are compiled but the tensor lies on a CPU, or for a GPU below sm_80.
    """
    if INTERPRETED:
        return TARGETS["interpreter"]
    if device.type != "cuda":
        raise RuntimeError(
            f"dsv4_triton: tensors are on {device}, but kernels are compiled for a GPU. Move them to a GPU, or set "
            "TRITON_INTERPRET=1 before importing dsv4_triton."
        )
    return _gpu_target(device.index if device.index is not None else torch.cuda.current_device())


@contextmanager
def launching_on(x: torch.Tensor) -> Iterator[None]:
    """Launch on the tensor's GPU; interpreted, keep numpy as quiet about overflow and NaN as a GPU is."""
    with torch.cuda.device_of(x), np.errstate(all="ignore"):
        yield
