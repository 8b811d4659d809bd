"""Sparse attention on the host side: shapes into launches, splits by fixed size, workspace within a bound.

Nothing here reads a tensor's value, so every call can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton

from dsv4_triton.arguments import (
    KeyList,
    check_bf16_keys,
    check_indices,
    check_list,
    check_out,
    check_q,
    check_sink,
    describe,
    on_16_bytes,
)
from dsv4_triton.attention_kernel import attend
from dsv4_triton.choice import choose
from dsv4_triton.combine import combine
from dsv4_triton.target import launching_on, target_of
from dsv4_triton.workload import COMBINE_HEADS, LOG2E, workload

#: Keys a split. A constant: a count that followed the batch would make a row's bits depend on its neighbours.
SPLIT_KEYS = 640


def launch(
    q: torch.Tensor,
    main: KeyList,
    extra: KeyList | None,
    sink: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Attend and write ``out`` and ``lse``. Arguments are checked by the callers.

    q, out: bf16 ``[b, s_q, H, 512]``, contiguous last dimension. lse: fp32 ``[b, s_q, H]``, any strides.
    """
    if q.shape[0] * q.shape[1] == 0:
        return
    target = target_of(q.device)
    if choose(target.name, q, main, extra, scale, out).kernel == "hopper":
        from dsv4_triton.hopper import launch as hopper  # imported where it is used: other targets need no Gluon

        hopper.launch(q, main, extra, sink, scale, out, lse)
        return
    split_blocks = SPLIT_KEYS // target.block_n
    work = workload(q, main, extra, sink, lse, target.block_n, split_blocks)
    other, heads = work.other, q.shape[2]
    aligned = main.aligned() and other.aligned() and on_16_bytes(q, 3) and on_16_bytes(out, 3)
    output = (out, *out.stride()[:3], lse, *lse.stride(), work.sinks)
    with launching_on(q):
        for first in range(0, work.rows, work.chunk):
            count = min(work.chunk, work.rows - first)
            attend[(count * triton.cdiv(heads, target.block_h), work.splits)](
                q, *q.stride()[:3], *output, scale * LOG2E, q.shape[1], heads, first,
                *main.addressing(), main.indices, *main.indices.stride(), work.lengths, main.width,
                *other.addressing(), other.indices, *other.indices.stride(), work.extra_lengths, work.extra_width,
                work.given, work.partial, work.splits,
                PACKED=main.packed, ALIGNED=aligned, ASM=target.packed_decode,
                BLOCK_H=target.block_h, BLOCK_N=target.block_n, SPLIT_BLOCKS=split_blocks, PARTS=target.parts,
                num_warps=target.num_warps, num_stages=target.num_stages, enable_fp_fusion=True,
            )  # fmt: skip
            if work.splits > 1:
                per = heads if target.name == "interpreter" else COMBINE_HEADS
                combine[(count, heads // per)](
                    work.partial, work.splits, *output, q.shape[1], heads, first,
                    work.lengths, main.width, work.extra_lengths, work.extra_width, work.given,
                    ALIGNED=aligned, BLOCK_N=target.block_n, SPLIT_BLOCKS=split_blocks, HEADS=per,
                    num_warps=4, enable_fp_fusion=True,
                )  # fmt: skip


def sparse_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
    sink: torch.Tensor | None,
    scale: float,
    *,
    extra_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_lengths: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of query rows over packed keys, one softmax over both lists, K and V the same 512 vector.

    Args:
        q: bf16 ``[T, H, 512]``, any strides with a contiguous last dimension; H is 16, 32, 64 or 128.
        cache: packed pages ``[pages, page, 1, 584]`` (``PackedPool.view``).
        indices: int32 ``[T, W]`` slots; values outside the cache are ignored.
        lengths: int32 ``[T]``, entries of each row that count, clamped to [0, W]; None means W.
        sink: fp32 ``[H]``, a key of that score with a value of zero; None means none.
        scale: multiplies q . k.
        extra_cache, extra_indices, extra_lengths: a second list of keys.
        out: bf16 ``[T, H, 512]``, written in place. lse: fp32 ``[T, H]``, written in place.

    Returns:
        ``(out, lse)``: lse is the natural log over the keys, the sink not among them; +inf, and an output of exact
        zeros, for a row without keys.

    Raises:
        TypeError, ValueError: naming the argument, before anything is launched.
    """
    who = "sparse_attention"
    check_q(who, q, "T, H")
    main = check_list(who, "cache", "indices", "lengths", cache, indices, lengths, q.shape[:1], q.device)
    extra = None
    if extra_cache is not None or extra_indices is not None or extra_lengths is not None:
        extra = check_list(
            who, "extra_cache", "extra_indices", "extra_lengths", extra_cache, extra_indices, extra_lengths,
            q.shape[:1], q.device,
        )  # fmt: skip
    return _rows(who, q, main, extra, sink, scale, out, lse)


def sparse_attention_bf16(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
    sink: torch.Tensor | None,
    scale: float,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same over bf16 keys ``[N, 512]`` with a contiguous last dimension: FlashMLA's ``flash_mla_sparse_fwd``."""
    who = "sparse_attention_bf16"
    check_q(who, q, "T, H")
    check_bf16_keys(who, kv, q.device)
    main = KeyList(kv, *check_indices(who, "indices", "lengths", indices, lengths, q.shape[:1], q.device))
    return _rows(who, q, main, None, sink, scale, out, lse)


def _rows(
    who: str, q: torch.Tensor, main: KeyList, extra: KeyList | None, sink: torch.Tensor | None, scale: float,
    out: torch.Tensor | None, lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    check_sink(who, "sink", sink, q)
    out = check_out(who, "out", out, q)
    if lse is None:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    elif lse.dtype != torch.float32 or lse.shape != q.shape[:2] or lse.device != q.device:
        raise ValueError(f"{who}: lse must be fp32 {tuple(q.shape[:2])} on {q.device}, got {describe(lse)}")
    launch(q.unsqueeze(1), main, extra, sink, scale, out.unsqueeze(1), lse.unsqueeze(1))
    return out, lse
