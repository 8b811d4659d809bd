"""Packed pages built without the kernels under test, and a small fp64 softmax to hold them against."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

import numpy as np
import pytest
import torch
from dsv4_reference.codec import dequantise, quantise
from dsv4_triton import COMPILE_ONLY
from torch import Tensor

SCALE = 512**-0.5


@dataclass(frozen=True)
class Keys:
    """A packed pool and what it holds.

    ``view``: uint8 ``[pages, page, 1, 584]``. ``values``: fp64 ``[slots, 512]``, NaN where the pool is poisoned.
    """

    view: Tensor
    values: Tensor


@dataclass(frozen=True)
class Answer:
    """fp64 ``out [T, H, 512]``, ``lse [T, H]``, and the bound of |error| that a correct kernel keeps, by element."""

    out: Tensor
    lse: Tensor
    bound: Tensor


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


MACHINE_CODE = (
    "import json, sys\n"
    "from dsv4_triton.aot import compile_kernel, opcodes\n"
    "from dsv4_triton.target import TARGETS\n"
    "for name in sys.argv[2:]:\n"
    "    print(json.dumps(opcodes(compile_kernel(name, TARGETS[sys.argv[1]])[1].asm['cubin'])))\n"
)


@pytest.fixture(scope="session")
def compile_only() -> Callable[..., str]:
    """What a script prints in a process that compiles kernels and can run none, with arguments."""

    def printed(script: str, *arguments: str) -> str:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {COMPILE_ONLY: "1"}
        command = [sys.executable, "-c", script, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    return printed


@pytest.fixture(scope="session")
def machine_code(compile_only: Callable[..., str]) -> Callable[..., dict[str, list[str]]]:
    """Compiles kernels for a target: names of their machine instructions in order."""

    def compiled(target: str, *names: str) -> dict[str, list[str]]:
        lines = compile_only(MACHINE_CODE, target, *names).splitlines()
        return dict(zip(names, map(json.loads, lines), strict=True))

    return compiled


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    return torch.Generator().manual_seed(crc32(request.node.name.encode()))


def packed_bytes(rows: Tensor, slots: Tensor, pages: int, page: int, stride: int | None = None) -> np.ndarray:
    """bf16 ``rows`` at ``slots`` of pages ``[pages, stride]`` whose every other byte is 0xFF: NaN if it is read."""
    stride = -(-page * 584 // 576) * 576 if stride is None else stride
    pool = np.full((pages, stride), 0xFF, np.uint8)
    codes, scales = quantise(rows)
    rope = rows[:, 448:].contiguous().view(torch.int16).numpy().astype("<i2").view(np.uint8).reshape(-1, 128)
    at, entry = np.divmod(slots.numpy(), page)
    data = entry[:, None] * 576 + np.arange(576)
    pool[at[:, None], data] = np.concatenate([codes.numpy(), rope], axis=1)
    pool[at[:, None], page * 576 + entry[:, None] * 8 + np.arange(7)] = scales.numpy()
    return pool


@pytest.fixture
def pack() -> Callable[..., np.ndarray]:
    return packed_bytes


@pytest.fixture
def make_keys(device: str) -> Callable[..., Keys]:
    """``make_keys(rows, slots, pages, page, stride=None)``: a pool with ``rows`` bf16 ``[N, 512]`` at ``slots``."""

    def make(rows: Tensor, slots: Tensor, pages: int, page: int, stride: int | None = None) -> Keys:
        packed = torch.from_numpy(packed_bytes(rows, slots, pages, page, stride)).to(device)
        codes, scales = quantise(rows)
        values = torch.full((pages * page, 512), torch.nan, dtype=torch.float64)
        values[slots] = torch.cat([dequantise(codes, scales), rows[:, 448:].double()], dim=1)
        view = packed[:, : page * 584].unflatten(1, (page, 1, 584))
        return Keys(view, values.to(device))

    return make


@pytest.fixture
def random_keys(make_keys: Callable[..., Keys], generator: torch.Generator) -> Callable[..., tuple[Keys, Tensor]]:
    """``random_keys(pages, page, live=1.0)``: keys in a random part of the slots, and those slots."""

    def make(pages: int, page: int, live: float = 1.0, stride: int | None = None) -> tuple[Keys, Tensor]:
        count = max(1, round(pages * page * live))
        slots = torch.randperm(pages * page, generator=generator)[:count]
        rows = torch.randn(count, 512, generator=generator).bfloat16()
        return make_keys(rows, slots, pages, page, stride), slots.int()

    return make


def attend(q: Tensor, lists: list[tuple[Tensor, Tensor, Tensor | None]], sink: Tensor | None, scale: float) -> Answer:
    """fp64 softmax of ``q [T, H, 512]`` over lists of (values ``[slots, 512]``, indices ``[T, W]``, lengths)."""
    q = q.double()
    keys, valid = [], []
    for values, indices, lengths in lists:
        inside = (indices >= 0) & (indices < values.shape[0])
        if lengths is not None:
            inside &= torch.arange(indices.shape[1], device=q.device) < lengths[:, None]
        some = values if values.shape[0] else values.new_zeros(1, 512)
        gathered = some[torch.where(inside, indices, 0).long()]
        keys.append(torch.where(inside[..., None], gathered, 0.0))
        valid.append(inside)
    k, ok = torch.cat(keys, 1), torch.cat(valid, 1)[:, None, :]
    scores = torch.einsum("thd,tnd->thn", q, k) * scale
    scores = torch.where(ok, scores, -torch.inf)
    empty = ~ok.any(-1)
    top = torch.where(empty, 0.0, scores.amax(-1) if scores.shape[-1] else scores.new_zeros(scores.shape[:-1]))
    p = torch.exp(scores - top[..., None])
    total = p.sum(-1)
    with_sink = total if sink is None else total + torch.exp(sink.double() - top)
    p = torch.where(empty[..., None], 0.0, p / with_sink[..., None])
    out = torch.einsum("thn,tnd->thd", p, k)
    lse = torch.where(empty, torch.inf, top + torch.log(total))
    # the output's bf16 rounding, and on a GPU the same for each probability that enters the product
    weights = 2.0**-8 if q.is_cuda else 2.0**-16
    bound = 2.0**-8 * out.abs() + weights * torch.einsum("thn,tnd->thd", p, k.abs()) + 1e-6
    return Answer(out, lse, bound)


@pytest.fixture
def oracle() -> Callable[..., Answer]:
    return attend


@pytest.fixture
def check() -> Callable[[tuple[Tensor, Tensor], Answer], None]:
    """Fail unless (out, lse) keep the bound, with exact zeros and +inf where a row has no key."""

    def compare(got: tuple[Tensor, Tensor], want: Answer) -> None:
        out, lse = got
        assert out.dtype == torch.bfloat16
        assert lse.dtype == torch.float32
        excess = (out.double() - want.out).abs() - want.bound
        assert bool((excess <= 0).all()), f"error exceeds its bound by {excess.nan_to_num(torch.inf).max().item():.3g}"
        empty = want.lse == torch.inf
        assert bool((out[empty] == 0).all())
        assert bool((lse[empty] == torch.inf).all())
        lse_error = (lse.double() - want.lse)[~empty].abs()
        assert bool((lse_error <= 1e-3 + 1e-6 * want.lse[~empty].abs()).all())

    return compare


INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


@pytest.fixture
def queries(generator: torch.Generator, device: str) -> Callable[..., Tensor]:
    """``queries(T, H, ...)``: bf16 ``[T, H, 512]``."""
    return lambda *shape: torch.randn(*shape, 512, generator=generator).bfloat16().to(device)


@pytest.fixture
def ints(device: str) -> Callable[..., Tensor]:
    """``ints(3, 5)``: int32 ``[2]``."""
    return lambda *values: torch.tensor(values, dtype=torch.int32, device=device)


@pytest.fixture
def choose_slots(generator: torch.Generator, device: str) -> Callable[..., Tensor]:
    """``choose_slots(slots, T, W, holes=0.0)``: int32 ``[T, W]`` drawn from slots, a part of them replaced by junk."""

    def make(slots: Tensor, rows: int, width: int, holes: float = 0.0) -> Tensor:
        at = torch.randint(len(slots), (rows, width), generator=generator)
        junk = torch.tensor([-1, INT_MIN, INT_MAX, 1 << 30], dtype=torch.int32)
        junk = junk[torch.randint(4, (rows, width), generator=generator)]
        hole = torch.rand(rows, width, generator=generator) < holes
        return torch.where(hole, junk, slots[at]).to(device)

    return make
