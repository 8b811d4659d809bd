"""Registers and spills, read from what Triton keeps with each function of a loaded module."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

from dsv4_matrix.bench.resources import kernel_resources
from dsv4_matrix.bench.results import KernelResources


def kernel(registers: int, words: int, constants: dict[object, object], loaded: bool = True) -> SimpleNamespace:
    metadata = SimpleNamespace(num_warps=4, shared=64)
    source = SimpleNamespace(constants=constants)
    return SimpleNamespace(
        metadata=metadata, src=source, n_regs=registers, n_spills=words, module=1 if loaded else None
    )


@pytest.fixture
def kernels(monkeypatch) -> dict[str, SimpleNamespace]:
    """What ``mine.attend`` was compiled to, by a key of its own; the module also has it under a second name."""
    compiled: dict[str, SimpleNamespace] = {}
    function = JITFunction.__new__(JITFunction)
    function.__module__, function.__name__ = "mine", "attend"
    function.arg_names = ["x", "n", "ROWS", "ASM", "P"]
    function.device_caches = {0: (compiled, {}, None)}
    module = ModuleType("mine")
    module.attend = module.alias = function
    monkeypatch.setitem(sys.modules, "mine", module)
    return compiled


def test_each_loaded_kernel_is_told_once(kernels):
    constants = {(2,): 8, (3,): True, (1,): 1, (4,): "text"}
    kernels["a"] = kernel(168, 48, constants)
    kernels["b"] = kernel(168, 48, constants)
    kernels["c"] = kernel(0, 0, {(2,): 4}, loaded=False)
    first = KernelResources("mine.attend", "ASM=1 ROWS=8", 4, 168, 192, 64)
    assert [one for one in kernel_resources() if one.name == "mine.attend"] == [first]
    kernels["c"].module, kernels["c"].n_regs = 1, 55
    second = KernelResources("mine.attend", "ROWS=4", 4, 55, 0, 64)
    assert [one for one in kernel_resources() if one.name == "mine.attend"] == [first, second]


def test_this_triton_keeps_what_is_read():
    """No GPU is needed to see by which names: a cache a device, constants of sources, the driver's answer."""
    compiling = inspect.getsource(JITFunction._do_compile)
    assert "kernel_cache, _, target, backend, _ = self.device_caches[device]" in compiling
    assert "kernel_cache[key] = kernel" in compiling
    assert "self.constants[k] = v" in inspect.getsource(ASTSource.__init__)
    assert "self.n_regs, self.n_spills" in inspect.getsource(CompiledKernel._init_handles)
    assert "self.src = src" in inspect.getsource(CompiledKernel.__init__)
