"""Every kernel compiles for every target, within its shared memory, on a machine without a GPU.

slow_compile: ten to twenty seconds a target on one core with a cold Triton cache, two warm.
"""

from __future__ import annotations

import pytest
import triton
from dsv4_triton.aot import compile_in_subprocess
from dsv4_triton.target import TARGETS, nvidia_target

COMPILED = [name for name in TARGETS if name not in ("interpreter", "sm86")]  # sm86 is sm80's code with sm89's tiles
MATRIX_INSTRUCTION = {"sm90": "wgmma", "gfx950": "mfma"}

#: The no-spill claim is about the pinned toolchain; register allocation of other versions differs.
PINNED = triton.__version__.startswith("3.7.")


@pytest.mark.parametrize("target", COMPILED)
def test_kernels_fit(target):
    kernels = {k.kernel: k for k in compile_in_subprocess(target, "attend_packed", "attend_bf16", "store", "unpack")}
    assert sorted(kernels) == ["attend_bf16", "attend_packed", "store", "unpack"]
    for kernel in kernels.values():
        assert 0 <= kernel.shared <= TARGETS[target].shared_limit, kernel
        if PINNED and target != "gfx950":
            assert kernel.stack_bytes == 0, f"registers spilled: {kernel}"
    for name in ("attend_packed", "attend_bf16"):
        assert kernels[name].matrix_instruction == MATRIX_INSTRUCTION.get(target, "mma.sync"), kernels[name]


@pytest.mark.parametrize(
    ("kernel", "threads", "spilled"),
    [
        ("hopper", 512, 400), ("hopper_split", 512, 400), ("hopper_score_64", 640, 0), ("hopper_score_128", 640, 0),
        ("hopper_add_narrow", 384, 0), ("hopper_add_wide", 384, 0), ("hopper_add_wide_split", 384, 0),
        ("hopper_stream_64", 384, 0),
        ("hopper_stream_128", 512, 0), ("hopper_score_once_64", 384, 0), ("hopper_score_once_128", 512, 0),
    ],
)  # fmt: skip
def test_the_hopper_kernels_fit_a_processor(kernel, threads, spilled):
    """Most of a multiprocessor's registers and shared memory, wgmma; spilled scalars in bytes a thread."""
    (compiled,) = compile_in_subprocess("sm90", kernel)
    assert compiled.kernel == kernel
    assert compiled.shared <= TARGETS["sm90"].shared_limit, compiled
    assert compiled.matrix_instruction == "wgmma"
    assert compiled.registers * threads <= 65536, compiled
    if PINNED:
        assert compiled.stack_bytes <= spilled, compiled


def test_a_tile_too_large_is_seen(compile_only):
    """64 heads on sm_89 need more shared memory than it has: the numbers above are measured, not assumed."""
    script = (
        "import dataclasses, json\n"
        "from dsv4_triton.aot import compile_kernel\n"
        "from dsv4_triton.target import TARGETS\n"
        "wide = dataclasses.replace(TARGETS['sm89'], block_h=64, block_n=64)\n"
        "print(compile_kernel('attend_bf16', wide)[0].shared)\n"
    )
    assert int(compile_only(script)) > TARGETS["sm89"].shared_limit


def test_a_kernel_that_does_not_compile_is_an_error():
    with pytest.raises(RuntimeError, match="no_such_kernel"):
        compile_in_subprocess("sm90", "no_such_kernel")


@pytest.mark.parametrize(
    ("capability", "name"),
    [((8, 0), "sm80"), ((8, 6), "sm86"), ((8, 7), "sm80"), ((8, 9), "sm89"), ((9, 0), "sm90"), ((10, 0), "sm100"),
     ((10, 3), "sm100"), ((12, 0), "sm120"), ((12, 1), "sm120")],
)  # fmt: skip
def test_capabilities_find_their_target(capability, name):
    assert nvidia_target(*capability).name == name


def test_old_gpus_are_refused():
    with pytest.raises(RuntimeError, match=r"compute capability 7\.5 is not supported"):
        nvidia_target(7, 5)
