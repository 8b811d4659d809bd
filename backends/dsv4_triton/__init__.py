"""DeepSeek-V4 sparse attention over packed FP8 pages, in Triton.

``flash_mla_with_kvcache`` and ``get_mla_metadata`` are FlashMLA's calls for the sparse FP8 path; ``DSV4TritonBackend``
is a whole attention backend over its own pools. Without a GPU, set ``TRITON_INTERPRET=1`` before the import.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

#: set to 1 by ``aot``: kernels are compiled for another machine and never launched
COMPILE_ONLY = "DSV4_TRITON_COMPILE_ONLY"

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" and os.environ.get(COMPILE_ONLY) != "1":
    raise RuntimeError(
        "dsv4_triton: no GPU is visible to torch (torch.cuda.is_available() is False) and TRITON_INTERPRET is "
        f"{os.environ.get('TRITON_INTERPRET')!r}. Set TRITON_INTERPRET=1 before importing dsv4_triton to run the "
        "kernels on the CPU through Triton's interpreter, or make a GPU visible."
    )

_EXPORTS = {
    "flash_mla_with_kvcache": "dsv4_triton.flash_mla",
    "get_mla_metadata": "dsv4_triton.flash_mla",
    "PackedPool": "dsv4_triton.pool",
    "DSV4TritonBackend": "dsv4_triton.backend",
}

__all__ = ["DSV4TritonBackend", "PackedPool", "flash_mla_with_kvcache", "get_mla_metadata"]


def __getattr__(name: str) -> Any:
    """Exports are loaded on first use, so that each part imports only what it needs."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'dsv4_triton' has no attribute {name!r}; it exports {', '.join(__all__)}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
