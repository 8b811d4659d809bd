"""What importing the package promises, and constants that three parts state on purpose."""

from __future__ import annotations

import os
import subprocess
import sys

import dsv4_reference.geometry
import dsv4_triton
import pytest
import torch
from dsv4_triton import geometry
from dsv4_triton.arguments import divider
from dsv4_triton.pool import PackedPool


def run(code: str, **changes: str | None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in changes} | {"CUDA_VISIBLE_DEVICES": ""}
    environment |= {k: v for k, v in changes.items() if v is not None}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_a_bare_import_without_a_gpu_says_what_to_set():
    done = run("import dsv4_triton", TRITON_INTERPRET=None, DSV4_TRITON_COMPILE_ONLY=None)
    assert done.returncode == 1
    assert "RuntimeError: dsv4_triton: no GPU is visible" in done.stderr
    assert "Set TRITON_INTERPRET=1 before importing" in done.stderr


def test_interpreted_import_works_and_is_lazy():
    code = "import sys, dsv4_triton; print(sorted(m for m in sys.modules if m.startswith('dsv4_')))"
    done = run(code, TRITON_INTERPRET="1")
    assert done.stdout.strip() == "['dsv4_triton']", done.stderr


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match=r"has no attribute .flash_mla_with."):
        _ = dsv4_triton.flash_mla_with


def test_geometry_agrees_with_the_reference():
    """Each side states its constants; sharing them would hide a wrong one."""
    theirs = dsv4_reference.geometry
    assert (geometry.HEAD_DIM, geometry.NOPE_DIM, geometry.GROUP) == (theirs.HEAD_DIM, theirs.NOPE, theirs.GROUP)
    assert (geometry.DATA_BYTES, geometry.SCALE_BYTES) == (theirs.DATA_BYTES, theirs.SCALE_BYTES)
    assert geometry.TOKEN_BYTES == 584
    for page in (1, 2, 64, 128, 256, 576):
        assert geometry.page_stride(page) == theirs.page_stride(page)


@pytest.mark.parametrize(("page", "stride"), [(128, 74880), (64, 37440), (2, 1728), (256, 149760), (1, 1152)])
def test_pools_have_the_production_strides(page, stride):
    pool = PackedPool(3, page, "cpu")
    assert pool.buffer.shape == (3, stride)
    assert pool.view().shape == (3, page, 1, 584)
    assert pool.view().stride(0) == stride
    assert pool.view().data_ptr() == pool.buffer.data_ptr()
    assert pool.capacity == 3 * page
    assert not pool.buffer.any()


@pytest.mark.parametrize(("pages", "page"), [(0, 64), (3, 0)])
def test_empty_pools_are_refused(pages, page):
    with pytest.raises(ValueError, match="must be at least 1"):
        PackedPool(pages, page, "cpu")


def test_division_by_multiplication_is_exact():
    """Every divisor to 600 and some large, at the numerators where a quotient steps, to the last int32."""
    for d in [*range(1, 601), 65535, 65536, 99991, 2**20, 2**30 + 1, 2**31 - 1]:
        magic, shift = divider(d)
        q = torch.cat([torch.arange(0, 50), torch.tensor([(2**31 - 1) // d])])
        n = (q[:, None] * d + torch.tensor([-1, 0, 1, d - 1])).flatten()
        n = torch.cat([n[(n >= 0) & (n < 2**31)], torch.tensor([2**31 - 1, 2**31 - 2])])
        assert torch.equal((n * magic) >> shift, n // d), d
        assert int(n.max()) * magic < 2**63


def test_cpu_tensors_need_the_interpreter(monkeypatch):
    from dsv4_triton import target

    monkeypatch.setattr(target, "INTERPRETED", False)
    with pytest.raises(RuntimeError, match="tensors are on cpu, but kernels are compiled for a GPU"):
        target.target_of(torch.device("cpu"))
