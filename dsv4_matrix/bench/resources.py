"""Registers and spills of every Triton kernel that this process has launched, as the driver told them on loading.

Triton keeps what it compiled, or found in its cache on disk, with each function. Functions are looked for in the loaded
modules: no hook is set, since those make Triton write down each compilation's constants, which not all constants bear.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from dsv4_matrix.bench.results import KernelResources

#: what a kernel keeps to itself in 32-bit words, as Triton counts it
WORD_BYTES = 4
#: compile-time constants that are shown at most; the rest repeats the target
SHOWN = 8


def kernel_resources() -> list[KernelResources]:
    """By name; kernels that cannot be told apart count once. Kernels of other makers are not known to Triton."""
    found = set()
    for function in _functions():
        for kernel in _compiled(function):
            found.add(
                KernelResources(
                    name=f"{function.__module__}.{function.__name__}",
                    variant=_variant(function.arg_names, kernel.src.constants),
                    warps=int(kernel.metadata.num_warps),
                    registers=int(kernel.n_regs),
                    local_bytes=int(kernel.n_spills) * WORD_BYTES,
                    shared_bytes=int(kernel.metadata.shared),
                )
            )
    return sorted(found, key=lambda one: (one.name, one.variant))


def _functions() -> Iterator[Any]:
    """Triton functions at the top of a loaded module, each once."""
    from triton.runtime.jit import JITFunction

    seen = set()
    for module in list(sys.modules.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            # by its type: an instance may pretend to be of any class, and break at the question
            if issubclass(type(value), JITFunction) and id(value) not in seen:
                seen.add(id(value))
                yield value


def _compiled(function: Any) -> Iterator[Any]:
    """Compiled kernels of a function, on any device, that have been loaded."""
    for cache in list(function.device_caches.values()):
        for kernel in list(cache[0].values()):
            if getattr(kernel, "module", None) is not None:
                yield kernel


def _variant(names: list[str], constants: Mapping[Any, Any]) -> str:
    """Constants that are true, false or numbers, as ``A=1 B=2``; a key is the path to an argument, its index first."""
    shown = {}
    for path, value in constants.items():
        index = path[0] if isinstance(path, tuple) else path
        name = names[index] if isinstance(index, int) else str(index)
        if isinstance(value, int) and name.isupper():
            shown[name] = int(value)
    return " ".join(f"{name}={value}" for name, value in sorted(shown.items())[:SHOWN])
