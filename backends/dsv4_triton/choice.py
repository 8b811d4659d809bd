"""Which attention kernel serves a call: a function of setting, target, shapes, strides and alignment, with its reason.

Batch size, lengths and values have no part in it: a row's bits must not depend on what is computed beside it. The one
for Hopper serves what it can on such a GPU, few rows by other programs than many but with the same bits;
``DSV4_TRITON_KERNEL=portable``, read once when this module is imported, leaves everything to the portable kernel.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module

import torch
import triton

from dsv4_triton.arguments import KeyList, on_16_bytes

SETTING = "DSV4_TRITON_KERNEL"
KERNELS = ("portable", "hopper")
PREFERRED = os.environ.get(SETTING, "hopper")
if PREFERRED not in KERNELS:
    raise RuntimeError(f"dsv4_triton: {SETTING} must be {' or '.join(KERNELS)}, got {PREFERRED!r}")

TRITON = triton.__version__
#: Gluon is experimental: its interface may change with any release, so only releases that were tried are trusted
GLUON_RELEASES = ("3.6", "3.7")
HOPPER_HEADS = (64, 128)
#: the Hopper kernel keeps places in a cache as 32-bit counts of 16 bytes
HOPPER_REACH = 16 * (2**31 - 1)


@dataclass(frozen=True)
class Choice:
    """``kernel``: ``hopper`` or ``portable``. ``reason``: one sentence that says why."""

    kernel: str
    reason: str


def choose(
    target: str, q: torch.Tensor, main: KeyList, extra: KeyList | None, scale: float, out: torch.Tensor
) -> Choice:
    """The kernel for a call on a target (``Target.name``); shapes as ``attention.launch`` takes them."""
    if PREFERRED != "hopper":
        return Choice("portable", f"{SETTING}={PREFERRED} leaves everything to the portable kernel")
    if target != "sm90":
        return Choice("portable", f"the Hopper kernel is for sm90, this is {target}")
    if ".".join(TRITON.split(".")[:2]) not in GLUON_RELEASES:
        return Choice(
            "portable",
            f"the Hopper kernel is known to compile with Triton {' and '.join(GLUON_RELEASES)}, this is {TRITON}",
        )
    heads = q.shape[2]
    if heads not in HOPPER_HEADS:
        return Choice("portable", f"the Hopper kernel takes 64 query heads at a time, these are {heads}")
    if not scale > 0:
        return Choice("portable", f"the Hopper kernel needs a positive softmax scale, got {scale}")
    for name, x in (("q", q), ("out", out)):
        if not on_16_bytes(x, 3):
            return Choice("portable", f"{name} does not keep its rows on 16 bytes (strides {x.stride()})")
    for name, keys in (("the key list", main), ("the extra key list", extra)):
        if keys is not None and (refused := _refused(keys)):
            return Choice("portable", f"{name} {refused}")
    return Choice("hopper", f"packed keys, {heads} heads and pages of a power of two on sm90")


def _refused(keys: KeyList) -> str | None:
    if not keys.packed:
        return "is bf16"
    pages, page = keys.keys.shape[:2]
    if pages == 0 or keys.width == 0:
        return f"has {pages} pages and {keys.width} indices a row, where one each is read ahead"
    if page & (page - 1):
        return f"has pages of {page} entries, not a power of two"
    if not keys.aligned():
        return f"does not keep its pages on 16 bytes (page stride {keys.keys.stride(0)})"
    if pages * keys.keys.stride(0) > HOPPER_REACH:
        return f"is larger than {HOPPER_REACH} bytes"
    if keys.indices.stride(2) != 1:
        return f"has indices of stride {keys.indices.stride(2)}, not contiguous"
    return None


def load_kernels() -> None:
    """Import what ``attention.launch`` would import for its first call on this device."""
    if PREFERRED == "hopper" and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        with suppress(ImportError):  # another Triton: ``choose`` gives nothing to that kernel
            import_module("dsv4_triton.hopper.launch")
