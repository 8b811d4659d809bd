"""A FlashMLA-compatible function as something to be timed: names, argument order and meaning are FlashMLA's."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dsv4_matrix.bench.floors import HEAD_DIM
from dsv4_matrix.bench.inputs import Inputs
from dsv4_matrix.loading import load_kernel

#: what is timed beside the kernel under test wherever it can be imported
PEER = "flash_mla:flash_mla_with_kvcache"


@dataclass(frozen=True)
class Kernel:
    """``function`` with FlashMLA's signature, and ``metadata`` that makes its scheduler metadata."""

    name: str
    function: Callable[..., tuple[Tensor, Tensor]]
    metadata: Callable[..., Any]
    #: optional ``kernel_choice`` beside the function: which kernel it takes for given tensors, in words
    choice: Callable[..., Any] | None = None

    def described(self, inputs: Inputs) -> str:
        """What the function itself says of how it serves these inputs; empty if it says nothing."""
        if self.choice is None:
            return ""
        extra = inputs.extra
        lists = () if extra is None else (extra.cache, extra.indices)
        found = self.choice(inputs.q, inputs.main.cache, inputs.main.indices, *lists)
        return f"{found.kernel}: {found.reason}"

    def call(self, inputs: Inputs) -> Callable[[], tuple[Tensor, Tensor]]:
        """The call on these inputs. Scheduler metadata is made here, once, outside of what is timed."""
        scheduler, *_ = self.metadata()
        main, extra = inputs.main, inputs.extra

        def call() -> tuple[Tensor, Tensor]:
            return self.function(
                inputs.q,
                main.cache,
                None,
                None,
                HEAD_DIM,
                scheduler,
                None,
                softmax_scale=inputs.scale,
                causal=False,
                is_fp8_kvcache=True,
                indices=main.indices,
                attn_sink=inputs.sink,
                extra_k_cache=None if extra is None else extra.cache,
                extra_indices_in_kvcache=None if extra is None else extra.indices,
                topk_length=main.lengths,
                extra_topk_length=None if extra is None else extra.lengths,
            )

        return call


def find_kernel(selection: str | None) -> Kernel:
    """The kernel that ``selection`` names (entry point or ``module:attr``). Raises LoadError."""
    name, function = load_kernel(selection)
    module = sys.modules[function.__module__]
    metadata = getattr(module, "get_mla_metadata", lambda: (None, None))
    return Kernel(name, function, metadata, getattr(module, "kernel_choice", None))


def find_peer() -> Kernel | None:
    """FlashMLA, if it is installed here."""
    if importlib.util.find_spec(PEER.split(":")[0]) is None:
        return None
    return find_kernel(PEER)
