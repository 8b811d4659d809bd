"""Registers and spills: read through Triton's own hook, of kernels that were launched, and never an end of the run."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import triton
from triton.runtime.jit import JITFunction

from dsv4_matrix.bench.resources import CompiledKernels, compiled_kernels
from dsv4_matrix.bench.results import KernelResources


def kernel(registers: int, words: int, loaded: bool = True) -> SimpleNamespace:
    metadata = SimpleNamespace(num_warps=4, shared=64)
    module = 1 if loaded else None
    return SimpleNamespace(metadata=metadata, n_regs=registers, n_spills=words, module=module)


def said(compiled: object, constants: dict[object, object]) -> dict[str, object]:
    """What Triton hands to the hook."""
    function = SimpleNamespace(device_caches={0: ({"key": compiled}, None)}, arg_names=["x", "n", "ROWS", "ASM", "P"])
    info = SimpleNamespace(module="mine", name="attend", jit_function=function)
    compile_ = {"device": 0, "constants": constants}
    return {"key": "key", "repr": "", "fn": info, "compile": compile_, "is_manual_warmup": False}


def test_what_the_driver_says_is_read_once_the_kernel_is_loaded():
    kernels, late = CompiledKernels(), kernel(0, 0, loaded=False)
    kernels.note(**said(kernel(168, 48), {(2,): 8, (3,): True, (1,): 1, (4,): "text"}))
    kernels.note(**said(kernel(168, 48), {(2,): 8, (3,): True}))
    kernels.note(**said(late, {(2,): 4}))
    first = KernelResources("mine.attend", "ASM=1 ROWS=8", 4, 168, 192, 64)
    assert kernels.resources() == [first]
    late.module, late.n_regs = 1, 55
    assert kernels.resources() == [first, KernelResources("mine.attend", "ROWS=4", 4, 55, 0, 64)]


def test_the_hook_stands_only_inside_and_calls_an_earlier_one(monkeypatch):
    heard = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **told: heard.append(told["key"]))
    before = triton.knobs.runtime.jit_post_compile_hook
    with compiled_kernels() as kernels:
        triton.knobs.runtime.jit_post_compile_hook(**said(kernel(40, 0), {}))
    assert triton.knobs.runtime.jit_post_compile_hook is before
    assert [one.registers for one in kernels.resources()] == [40]
    assert heard == ["key"]


@pytest.mark.parametrize("change", [{"fn": None}, {"compile": {}}, {"key": "another"}])
def test_a_hook_that_says_other_things_is_counted_and_ends_nothing(change):
    with compiled_kernels() as kernels:
        triton.knobs.runtime.jit_post_compile_hook(**{**said(kernel(40, 0), {}), **change})
    assert (kernels.unknown, kernels.resources()) == (1, [])


def test_this_triton_calls_the_hook_with_the_names_that_are_read():
    """No GPU is needed to read that the cache is filled before the hook is called, and by which names."""
    call, compile_ = (inspect.getsource(method) for method in (JITFunction._call_hook, JITFunction._do_compile))
    for name in ("key=key", "fn=JitFunctionInfo(module, name, self)", "'constants': constants", "'device': device"):
        assert name in call
    assert "kernel_cache, _, target, backend, _ = self.device_caches[device]" in compile_
    assert compile_.rindex("kernel_cache[key] = kernel") < compile_.rindex("jit_post_compile_hook")
