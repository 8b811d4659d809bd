"""Registers and spills of every Triton kernel that runs meanwhile, told by Triton's own hook; other kernels stay dark.

``jit_post_compile_hook`` is called for a kernel that is compiled and for one that comes from the cache on disk. What
the driver says of it is known once it has been loaded, at its first launch, so it is read at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dsv4_matrix.bench.results import KernelResources

#: what a kernel keeps to itself in 32-bit words, as Triton counts it
WORD_BYTES = 4
#: names of compile-time constants that are shown at most; the rest repeats the target
SHOWN = 8


class CompiledKernels:
    """The kernels seen so far.

    ``unknown`` counts those of which this Triton's hook says nothing that is understood here: hooks are no fixed
    interface, and a benchmark must not end over them.
    """

    def __init__(self) -> None:
        self.unknown = 0
        self._seen: list[tuple[str, str, Any]] = []

    def note(self, *, key: Any, fn: Any, compile: Mapping[str, Any], **_: Any) -> None:
        """Triton's hook: ``fn`` names the function, ``compile`` its device and constants."""
        cache = fn.jit_function.device_caches[compile["device"]][0]
        self._seen.append((f"{fn.module}.{fn.name}", _variant(fn.jit_function, compile["constants"]), cache[key]))

    def resources(self) -> list[KernelResources]:
        """Of each kernel that has been launched, by name; two that cannot be told apart count once."""
        found = {
            KernelResources(
                name,
                variant,
                int(kernel.metadata.num_warps),
                int(kernel.n_regs),
                int(kernel.n_spills) * WORD_BYTES,
                int(kernel.metadata.shared),
            )
            for name, variant, kernel in self._seen
            if getattr(kernel, "module", None) is not None
        }
        return sorted(found, key=lambda one: (one.name, one.variant))


@contextmanager
def compiled_kernels() -> Iterator[CompiledKernels]:
    """Watch what Triton compiles or loads inside; an earlier hook goes on being called."""
    from triton import knobs

    kernels, before = CompiledKernels(), knobs.runtime.jit_post_compile_hook

    def hook(**said: Any) -> Any:
        try:
            kernels.note(**said)
        except (AttributeError, IndexError, KeyError, TypeError):
            kernels.unknown += 1
        return before(**said) if before else None

    knobs.runtime.jit_post_compile_hook = hook
    try:
        yield kernels
    finally:
        knobs.runtime.jit_post_compile_hook = before


def _variant(function: Any, constants: Mapping[Any, Any]) -> str:
    """Constants that are true, false or numbers, named as the function names them."""
    names = function.arg_names
    shown = {}
    for path, value in constants.items():
        index = path[0] if isinstance(path, tuple) else path
        name = names[index] if isinstance(index, int) else str(index)
        if isinstance(value, int) and name.isupper():
            shown[name] = value
    return " ".join(f"{name}={int(value)}" for name, value in sorted(shown.items())[:SHOWN])
