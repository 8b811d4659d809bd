"""What attention calls accept, checked before anything is launched; errors name the argument and what is supported.

Only shapes, dtypes, strides and devices are looked at, never values: a check that read a tensor would be a host sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsv4_triton.geometry import HEAD_DIM, NUM_HEADS, TOKEN_BYTES

PACKED_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)


@dataclass(frozen=True)
class KeyList:
    """One list of keys a row attends: where the keys lie and which of them.

    Attributes:
        keys: uint8 ``[pages, page, 1, 584]`` strided over packed pages, or bf16 ``[N, 512]``.
        indices: int32 ``[b, s_q, width]``, any strides; values outside the cache are ignored.
        lengths: int32 ``[b]``, clamped to [0, width]; None means the full width.
    """

    keys: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor | None

    @property
    def width(self) -> int:
        return self.indices.shape[2]

    @property
    def packed(self) -> bool:
        return self.keys.dtype != torch.bfloat16

    def addressing(self) -> tuple[torch.Tensor, int, int, int, int, int]:
        """Base tensor, entries a page and their divider, stride (bytes a page, or elements a bf16 row), slots."""
        entries = self.keys.shape[1] if self.packed else 1
        slots = min(self.keys.shape[0] * entries, 2**31 - 1)
        return self.keys, entries, *divider(entries), self.keys.stride(0), slots

    def aligned(self) -> bool:
        """Whether every key starts on 16 bytes, so that it is fetched in 16-byte pieces; otherwise in smaller ones."""
        return on_16_bytes(self.keys, 1)


def divider(d: int) -> tuple[int, int]:
    """``(magic, shift)`` with ``n // d == (n * magic) >> shift`` for every n in [0, 2**31) and d in [1, 2**31).

    magic * d exceeds 2**shift by less than d <= 2**(shift - 31), so the error of the quotient stays below 1 / d; the
    product stays below 2**63 (Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994).
    """
    shift = 31 + (d - 1).bit_length()
    return -(-(1 << shift) // d), shift


def on_16_bytes(x: torch.Tensor, dims: int) -> bool:
    """Whether the address and the strides of the leading ``dims`` dimensions are multiples of 16 bytes."""
    size = x.element_size()
    return x.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in x.stride()[:dims])


def describe(x: object) -> str:
    """A tensor in words, for errors."""
    if not isinstance(x, torch.Tensor):
        return repr(x)
    return f"{x.dtype} {tuple(x.shape)} with strides {x.stride()} on {x.device}"


def check_q(who: str, q: torch.Tensor, leading: str) -> None:
    """bf16 ``[leading, 512]``, H the last of ``leading``."""
    rank = leading.count(",") + 2
    if not isinstance(q, torch.Tensor) or q.dtype != torch.bfloat16:
        raise TypeError(f"{who}: q must be a bf16 tensor, got {describe(q)}")
    if q.ndim != rank or q.shape[-1] != HEAD_DIM or q.stride(-1) != 1:
        raise ValueError(
            f"{who}: q must be [{leading}, {HEAD_DIM}] with a contiguous last dimension, got {describe(q)}"
        )
    if q.shape[-2] not in NUM_HEADS:
        raise ValueError(f"{who}: q has {q.shape[-2]} heads; supported are {', '.join(map(str, NUM_HEADS))}")


def check_sink(who: str, name: str, sink: torch.Tensor | None, q: torch.Tensor) -> None:
    """fp32 ``[H]``, contiguous; another dtype is an error, never a reinterpretation."""
    if sink is None:
        return
    if not isinstance(sink, torch.Tensor) or sink.dtype != torch.float32:
        raise TypeError(f"{who}: {name} must be an fp32 tensor [{q.shape[-2]}], got {describe(sink)}")
    if sink.shape != q.shape[-2:-1] or not sink.is_contiguous() or sink.device != q.device:
        raise ValueError(
            f"{who}: {name} must be contiguous [{q.shape[-2]}], one a head, on {q.device}, got {describe(sink)}"
        )


def check_out(who: str, name: str, out: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor:
    """The given output, which must look like q, or a new contiguous one."""
    if out is None:
        return torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    if not isinstance(out, torch.Tensor) or out.dtype != torch.bfloat16:
        raise TypeError(f"{who}: {name} must be a bf16 tensor, got {describe(out)}")
    if out.shape != q.shape or out.stride(-1) != 1 or out.device != q.device:
        raise ValueError(
            f"{who}: {name} must be {tuple(q.shape)} with a contiguous last dimension on {q.device}, "
            f"got {describe(out)}"
        )
    return out


def check_cache(who: str, name: str, cache: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Packed pages ``[pages, page, 1, 584]``, dense inside a page, as a uint8 view."""
    if not isinstance(cache, torch.Tensor) or cache.dtype not in PACKED_DTYPES:
        raise TypeError(f"{who}: {name} must be a uint8, int8 or float8_e4m3fn tensor, got {describe(cache)}")
    if cache.ndim != 4 or cache.shape[2:] != (1, TOKEN_BYTES) or cache.shape[1] < 1:
        raise ValueError(f"{who}: {name} must be [pages, page, 1, {TOKEN_BYTES}], got {describe(cache)}")
    if cache.device != device:
        raise ValueError(f"{who}: {name} must be on q's device {device}, got {describe(cache)}")
    pages, page = cache.shape[:2]
    if cache.stride(3) != 1 or (page > 1 and cache.stride(1) != TOKEN_BYTES):
        raise ValueError(
            f"{who}: {name} must be dense inside a page (strides {TOKEN_BYTES} and 1), got {describe(cache)}; only "
            "pages may be strided"
        )
    if pages > 1 and (cache.stride(0) % 8 != 0 or cache.stride(0) < page * TOKEN_BYTES):
        raise ValueError(
            f"{who}: the page stride of {name} must be a multiple of 8 bytes and at least {page * TOKEN_BYTES}, "
            f"got {describe(cache)}; pad pages as PackedPool does"
        )
    if cache.data_ptr() % 8 != 0:
        raise ValueError(f"{who}: {name} must start at a multiple of 8 bytes, got address {cache.data_ptr():#x}")
    return cache if cache.dtype == torch.uint8 else cache.view(torch.uint8)


def check_bf16_keys(who: str, kv: torch.Tensor, device: torch.device) -> None:
    """bf16 ``[N, 512]``, contiguous last dimension."""
    if not isinstance(kv, torch.Tensor) or kv.dtype != torch.bfloat16:
        raise TypeError(f"{who}: kv must be a bf16 tensor, got {describe(kv)}")
    if kv.ndim != 2 or kv.shape[1] != HEAD_DIM or kv.stride(1) != 1 or kv.device != device:
        raise ValueError(
            f"{who}: kv must be [N, {HEAD_DIM}] with a contiguous last dimension on {device}, got {describe(kv)}"
        )


def check_indices(
    who: str,
    name: str,
    lengths_name: str,
    indices: torch.Tensor | None,
    lengths: torch.Tensor | None,
    leading: Sequence[int],
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """int32 ``[*leading, width]`` as ``[b, s_q, width]``, and int32 ``[b]`` or None."""
    if not isinstance(indices, torch.Tensor) or indices.dtype != torch.int32:
        raise TypeError(f"{who}: {name} must be an int32 tensor, got {describe(indices)}")
    if indices.ndim != len(leading) + 1 or tuple(indices.shape[:-1]) != tuple(leading) or indices.device != device:
        shape = ", ".join(map(str, leading))
        raise ValueError(f"{who}: {name} must be [{shape}, width] on {device}, got {describe(indices)}")
    if lengths is not None:
        if not isinstance(lengths, torch.Tensor) or lengths.dtype != torch.int32:
            raise TypeError(f"{who}: {lengths_name} must be an int32 tensor [{leading[0]}], got {describe(lengths)}")
        if tuple(lengths.shape) != (leading[0],) or lengths.device != device:
            raise ValueError(f"{who}: {lengths_name} must be [{leading[0]}] on {device}, got {describe(lengths)}")
        lengths = lengths.contiguous()
    if indices.stride(-1) * indices.shape[-1] >= 2**31:  # within a row, kernels count in 32 bits
        indices = indices.contiguous()
    return (indices.unsqueeze(1) if len(leading) == 1 else indices), lengths


def check_list(
    who: str,
    cache_name: str,
    indices_name: str,
    lengths_name: str,
    cache: torch.Tensor | None,
    indices: torch.Tensor | None,
    lengths: torch.Tensor | None,
    leading: Sequence[int],
    device: torch.device,
) -> KeyList:
    """A packed key list; cache and indices come together."""
    if cache is None or indices is None:
        raise ValueError(
            f"{who}: {cache_name} and {indices_name} come together, and {lengths_name} only with them; got "
            f"{cache_name}={describe(cache)}, {indices_name}={describe(indices)}"
        )
    cache = check_cache(who, cache_name, cache, device)
    return KeyList(cache, *check_indices(who, indices_name, lengths_name, indices, lengths, leading, device))
