# ruff: noqa: N803 - constexpr names are upper case, and Triton compiles a subset of Python
"""Pack bf16 rows into pages (quantise and scatter in one kernel), and gather packed rows back to bf16.

Tiling: both kernels move one row per 64-wide group of eight, the eighth being the rope: a ``[rows, 8, 64]`` tile reads
1024 contiguous bytes a row and writes 576, a thread holding whole 16-byte pieces. Rows are independent, so nothing is
shared between programs; eight rows give a program of four warps four 16-byte loads a thread in flight.

A store of a few thousand rows is one wave of programs, so what counts is how many memory latencies follow each other.
A row's values do not wait for its slot: they are asked for first, and a barrier keeps the assembler from moving them
behind the location and the slot map, which do follow each other. Where most rows write nothing (compressed entries),
their values are not read at all.
Every page offset is formed in 64 bits: pools exceed 2 GiB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4_triton.arguments import divider
from dsv4_triton.geometry import HEAD_DIM
from dsv4_triton.numerics import (
    decode_scaled,
    device_function,
    encode_scaled,
    inverse_scale,
    scale_byte,
)
from dsv4_triton.pool import PackedPool
from dsv4_triton.target import launching_on, target_of

#: slots and locations at or beyond it exist in no pool, and pages are found by a multiplication that is exact below it
REACH = tl.constexpr(2**31)


@device_function
def _slot_base(slot, page_entries, magic, shift, stride):
    """Byte offsets of a slot's data and of its scales, int64. Pages and rows of our pools are multiples of 576."""
    page = (slot * magic) >> shift
    entry = slot - page * page_entries
    data = page * stride + entry * 576
    scales = page * stride + (page_entries * 576 + entry * 8)
    return tl.multiple_of(data, 16), tl.multiple_of(scales, 8)


@triton.jit(
    do_not_specialize=["n", "mapping_size", "ratio_magic", "ratio_shift", "page_entries", "magic", "shift", "capacity"],
    do_not_specialize_on_alignment=["loc", "mapping"],
)
def _pack_and_store(
    k, k_stride, loc, mapping, mapping_size, ratio_magic, ratio_shift,
    pool, page_entries, magic, shift, capacity, stride, n,
    MAPPED: tl.constexpr, SPARSE: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < n
    group = tl.arange(0, 8)
    lane = tl.arange(0, 64)
    column = (group[:, None] * 64 + lane[None, :])[None, :, :]
    source = k + row.to(tl.int64) * k_stride
    if not SPARSE:
        bits = tl.load(source[:, None, None] + column, mask=live[:, None, None], other=0)
        rope = tl.load(source[:, None] + 448 + lane[None, :], mask=live[:, None], other=0)
        tl.debug_barrier()

    at = tl.load(loc + row, mask=live, other=0).to(tl.int64)
    live = live & (at > 0) & (at < REACH)
    if MAPPED:
        live = live & (at < mapping_size)
        slot = tl.load(mapping + at, mask=live, other=0).to(tl.int64)
    else:
        slot = (tl.where(live, at, 0) * ratio_magic) >> ratio_shift
    live = live & (slot > 0) & (slot < capacity)
    # all addresses here: where they are formed is where the compiler loads the slots anew for each layout
    data, scales = _slot_base(tl.where(live, slot, 0), page_entries, magic, shift, stride)
    code_at = pool + data[:, None, None] + column
    rope_at = (pool + data[:, None] + 448).to(tl.pointer_type(tl.int16)) + lane[None, :]
    scale_at = pool + scales[:, None] + group[None, :]
    nope = (group < 7)[None, :]
    owns_code, owns_rope, owns_scale = live[:, None, None] & nope[:, :, None], live[:, None], live[:, None] & nope
    if SPARSE:
        bits = tl.load(source[:, None, None] + column, mask=live[:, None, None], other=0)
        rope = tl.load(source[:, None] + 448 + lane[None, :], mask=live[:, None], other=0)

    # integers order like magnitudes once the sign is clear, and infinity and NaN are simply the largest ones
    amax = tl.max(bits.to(tl.int32) & 0x7FFF, axis=2)
    finite = amax < 0x7F80
    byte = scale_byte(tl.where(finite, amax, 0) << 16)
    factor = tl.where(finite, inverse_scale(byte), float("nan"))
    tl.store(code_at, encode_scaled(bits, factor[:, :, None], HARDWARE), mask=owns_code)
    tl.store(rope_at, rope, mask=owns_rope)
    tl.store(scale_at, tl.where(finite, byte, 255).to(tl.uint8), mask=owns_scale)


@triton.jit(
    do_not_specialize=["n", "page_entries", "magic", "shift", "capacity"], do_not_specialize_on_alignment=["slots"]
)
def _unpack(
    pool, page_entries, magic, shift, capacity, stride, slots, out, out_stride, n, ASM: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < n
    slot = tl.load(slots + row, mask=inside, other=0).to(tl.int64)
    live = inside & (slot >= 0) & (slot < capacity)
    data, scales = _slot_base(tl.where(live, slot, 0), page_entries, magic, shift, stride)

    group = tl.arange(0, 8)
    lane = tl.arange(0, 64)
    column = (group[:, None] * 64 + lane[None, :])[None, :, :]
    nope = (group < 7)[None, :]
    code = tl.load(pool + data[:, None, None] + column, mask=live[:, None, None] & nope[:, :, None], other=0)
    byte = tl.load(pool + scales[:, None] + group[None, :], mask=live[:, None] & nope, other=0).to(tl.int32)
    # before anything is stored, behind which it could not be moved: for all a compiler knows, that changes the pool
    rope_at = (pool + data[:, None] + 448).to(tl.pointer_type(tl.bfloat16)) + lane[None, :]
    rope = tl.load(rope_at, mask=live[:, None], other=0.0)
    to = out + row.to(tl.int64) * out_stride
    value = decode_scaled(code, byte[:, :, None], ASM)
    tl.store(to[:, None, None] + column, value, mask=inside[:, None, None] & nope[:, :, None])
    tl.store(to[:, None] + 448 + lane[None, :], rope, mask=inside[:, None])


def _slots(pool: PackedPool) -> int:
    """Slots of a pool that kernels reach."""
    return min(pool.capacity, 2**31 - 1)


def _check_rows(who: str, name: str, rows: torch.Tensor, indices: torch.Tensor, device: torch.device) -> None:
    if rows.dtype != torch.bfloat16 or rows.ndim != 2 or rows.shape[1] != HEAD_DIM or rows.stride(1) != 1:
        raise AssertionError(
            f"{who}: {name} must be bf16 [N, {HEAD_DIM}] with a contiguous last dimension, got "
            f"{rows.dtype} {tuple(rows.shape)} with strides {rows.stride()}"
        )
    if indices.dtype not in (torch.int32, torch.int64) or indices.ndim != 1 or indices.shape[0] != rows.shape[0]:
        raise AssertionError(
            f"{who}: slots must be int32 or int64 [{rows.shape[0]}], one a row of {name}, got "
            f"{indices.dtype} {tuple(indices.shape)}"
        )
    if rows.device != device or indices.device != device:
        raise ValueError(f"{who}: the pool is on {device}, {name} on {rows.device}, slots on {indices.device}")


def pack_and_store(
    k: torch.Tensor,
    slots: torch.Tensor,
    pool: PackedPool,
    *,
    mapping: torch.Tensor | None = None,
    ratio: int = 1,
    sparse: bool = False,
) -> None:
    """Quantise rows and write each to its slot of the pool.

    A group of 64 is scaled by 2**ceil(log2(amax / 448)), amax floored at 1e-4, and rounded to nearest even; a group
    that holds a NaN or an infinity gets scale byte 255 and reads back as NaN. Rope is copied bit for bit. Rows whose
    location or slot is <= 0, beyond the pool, or 2**31 and above write nothing, and no byte is written that no row
    owns. If two rows name one slot, which of them it holds afterwards is not defined.

    Args:
        k: bf16 ``[N, 512]``, any row stride.
        slots: int32 or int64 ``[N]``: slots; or, with ``mapping`` or ``ratio``, full token locations.
        mapping: int32 or int64 ``[M]``, slot of a full location (the SWA map); locations >= M are skipped.
        ratio: divide full locations by this (compressed pools: 4 or 128). Not together with ``mapping``.
        sparse: whether most rows are expected to write nothing. It decides the order of loads, never a result.

    Raises:
        AssertionError: for another dtype, rank, width or length, before anything is written.
        ValueError: for another device, mapping or ratio.
    """
    _check_rows("pack_and_store", "k", k, slots, pool.buffer.device)
    if mapping is not None and (
        mapping.ndim != 1 or mapping.dtype not in (torch.int32, torch.int64) or mapping.device != k.device or ratio != 1
    ):
        raise ValueError(
            "pack_and_store: mapping must be int32 or int64 [M] on the pool's device, without a ratio, got "
            f"{mapping.dtype} {tuple(mapping.shape)} on {mapping.device} with ratio {ratio}"
        )
    if ratio < 1:
        raise ValueError(f"pack_and_store: ratio must be at least 1, got {ratio}")
    n = k.shape[0]
    if n == 0:
        return
    target = target_of(k.device)
    with launching_on(k):
        _pack_and_store[(triton.cdiv(n, target.store_rows),)](
            k.view(torch.int16), k.stride(0), slots.contiguous(), slots if mapping is None else mapping.contiguous(),
            0 if mapping is None else mapping.shape[0], *divider(ratio),
            pool.buffer, pool.page_entries, *divider(pool.page_entries), _slots(pool), pool.buffer.stride(0), n,
            MAPPED=mapping is not None, SPARSE=sparse, HARDWARE=target.hardware_fp8, ROWS=target.store_rows,
            num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip


def unpack(pool: PackedPool, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Dequantise slots into bf16 rows: ``out[i] = pool[slots[i]]``, each value rounded to nearest even once.

    Args:
        slots: int32 or int64 ``[N]``. A slot outside the pool gives a row of zeros; callers clamp padding to 0.
        out: bf16 ``[N, 512]``, written; any row stride, so a slice of a workspace will do.

    Raises:
        AssertionError: for another dtype, rank, width or length, before anything is written.
        ValueError: for another device.
    """
    _check_rows("unpack", "out", out, slots, pool.buffer.device)
    n = out.shape[0]
    if n == 0:
        return
    target = target_of(out.device)
    with launching_on(out):
        _unpack[(triton.cdiv(n, target.store_rows),)](
            pool.buffer, pool.page_entries, *divider(pool.page_entries), _slots(pool), pool.buffer.stride(0),
            slots.contiguous(), out, out.stride(0), n,
            ASM=target.packed_decode, ROWS=target.store_rows, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
