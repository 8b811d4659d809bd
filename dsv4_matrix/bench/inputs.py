"""Inputs of one call, made on the device: packed caches of plausible keys, distinct selections, queries, a sink."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from dsv4_matrix.bench.floors import HEAD_DIM, TOKEN_BYTES
from dsv4_matrix.bench.shapes import Shape

NOPE, GROUP, DATA_BYTES = 448, 64, 576
#: keys that are packed; a larger cache repeats them, page by page, at addresses of its own
DISTINCT_KEYS = 65536
#: slots a request in (main, extra) list
SLOTS_MULTI_ROW = (16384, 16384)
SLOTS_SINGLE_ROW = (4096, 8192)


@dataclass(frozen=True)
class KeyList:
    """``cache`` uint8 ``[pages, page, 1, 584]``, ``indices`` int32 ``[b, s_q, width]``, ``lengths`` int32 ``[b]``."""

    cache: Tensor
    indices: Tensor
    lengths: Tensor | None


@dataclass(frozen=True)
class Inputs:
    """``q`` bf16 ``[b, s_q, H, 512]``, ``sink`` fp32 ``[H]``."""

    q: Tensor
    sink: Tensor
    main: KeyList
    extra: KeyList | None
    scale: float = HEAD_DIM**-0.5


def build_inputs(shape: Shape, device: torch.device) -> Inputs:
    """The same tensors for the same shape, by a generator seeded with its name."""
    generator = torch.Generator(device).manual_seed(crc32(shape.name.encode()))
    q = torch.randn(shape.batch, shape.s_q, shape.heads, HEAD_DIM, generator=generator, device=device)
    sink = torch.randn(shape.heads, generator=generator, device=device)
    main_slots, extra_slots = SLOTS_MULTI_ROW if shape.s_q > 1 else SLOTS_SINGLE_ROW
    main = _key_list(shape, shape.topk, shape.page, main_slots, False, generator)
    extra = None
    if shape.extra_topk:
        slots = shape.extra_slots or max(extra_slots, shape.extra_topk)
        extra = _key_list(shape, shape.extra_topk, shape.extra_page, slots, shape.extra_lengths, generator)
    return Inputs(q.clamp_(-1, 1).bfloat16(), sink, main, extra)


def _key_list(shape: Shape, width: int, page: int, slots: int, lengths: bool, generator: torch.Generator) -> KeyList:
    requests = 1 if shape.shared else shape.batch
    cache = packed_cache(requests * slots, page, generator)
    indices = _selections(shape, width, slots, generator)
    stated = torch.full((shape.batch,), width, dtype=torch.int32, device=generator.device) if lengths else None
    return KeyList(cache, indices, stated)


def _selections(shape: Shape, width: int, slots: int, generator: torch.Generator) -> Tensor:
    """Distinct slots of each row's request, in random order; a bounded number of rows at a time."""
    rows = torch.empty(shape.rows, width, dtype=torch.int32, device=generator.device)
    at_once = max(1, 2**24 // slots)
    for first in range(0, shape.rows, at_once):
        count = min(at_once, shape.rows - first)
        order = torch.rand(count, slots, generator=generator, device=generator.device).argsort(dim=1)
        rows[first : first + count] = order[:, :width]
    indices = rows.view(shape.batch, shape.s_q, width)
    if not shape.shared:
        indices += torch.arange(shape.batch, dtype=torch.int32, device=generator.device)[:, None, None] * slots
    return indices


def packed_cache(slots: int, page: int, generator: torch.Generator) -> Tensor:
    """``slots`` keys, normal / 10, in pages of the 584-byte format: uint8 ``[slots // page, page, 1, 584]``.

    Pages are padded to a multiple of 576 bytes, as serving engines allocate them.
    """
    distinct = min(slots, max(DISTINCT_KEYS, page))
    keys = torch.randn(distinct, HEAD_DIM, generator=generator, device=generator.device) / 10
    data, scales = _pack(keys.bfloat16())
    stride = -(-page * TOKEN_BYTES // DATA_BYTES) * DATA_BYTES
    pages = torch.zeros(slots // page, stride, dtype=torch.uint8, device=generator.device)
    block = distinct // page
    for first in range(0, slots // page, block):
        count = min(block, slots // page - first)
        pages[first : first + count, : page * DATA_BYTES] = data.view(-1, page * DATA_BYTES)[:count]
        pages[first : first + count, page * DATA_BYTES : page * TOKEN_BYTES] = scales.view(-1, page * 8)[:count]
    return pages.as_strided((len(pages), page, 1, TOKEN_BYTES), (stride, TOKEN_BYTES, TOKEN_BYTES, 1))


def _pack(keys: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 ``[N, 512]`` -> data ``[N, 576]``, scale bytes ``[N, 8]``: good for timing, not an oracle of the format."""
    groups = keys[:, :NOPE].float().unflatten(1, (-1, GROUP))
    exponent = (groups.abs().amax(-1).clamp_min(1e-4) / 448).log2().ceil()
    codes = (groups * torch.exp2(-exponent)[..., None]).to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
    rope = keys[:, NOPE:].contiguous().view(torch.uint8)
    scales = torch.zeros(len(keys), 8, dtype=torch.uint8, device=keys.device)
    scales[:, : NOPE // GROUP] = (exponent + 127).to(torch.uint8)
    return torch.cat([codes, rope], dim=1), scales
