"""The kernels compile for GPUs that are not here, and their assembly keeps what equal bits rest on."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "compile_kernels.py"


@functools.cache
def facts(target):
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), target], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "gfx950"])
def test_every_kernel_compiles(target):
    assert all(kernel["instructions"] > 20 for kernel in facts(target).values())


@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100"])
def test_coins_divide_in_fp64_and_clamp(target):
    coins = facts(target)["coins"]
    assert coins["fp64_divisions"] == 1
    assert coins["clamps"] == 1


@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100"])
def test_nothing_is_fused_or_may_be(target):
    told = facts(target)
    for name in set(told) - {"log-softmax-fused"}:
        assert told[name]["fused"] == 0, name
        assert told[name]["contractible"] == 0, name
    assert told["log-softmax-fused"]["fused"] > 0  # left to itself, the compiler fuses, so the option is needed


def test_nothing_is_fused_on_amd_beyond_exact_divisions():
    told = facts("gfx950")
    for name in ("coins", "hash", "classic", "log-softmax-without-temperature"):
        assert told[name]["fused"] == 0, name
    assert told["log-softmax-fused"]["fused"] > 0
