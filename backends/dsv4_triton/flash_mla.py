"""FlashMLA's call for sparse attention over the FP8 cache, so that a user swaps the import."""

from __future__ import annotations

from typing import Any

import torch

from dsv4_triton.arguments import check_list, check_out, check_q, check_sink
from dsv4_triton.attention import launch
from dsv4_triton.choice import Choice, choose
from dsv4_triton.geometry import HEAD_DIM
from dsv4_triton.target import target_of

WHO = "flash_mla_with_kvcache"


class SchedulerMetadata:
    """Stands where FlashMLA keeps its tile schedule. These kernels have none: splits follow each row's own lengths."""


def get_mla_metadata(*_: object, **__: object) -> tuple[SchedulerMetadata, None]:
    """``(scheduler metadata, None)`` for ``flash_mla_with_kvcache``; any arguments, as FlashMLA's newest version."""
    return SchedulerMetadata(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse attention over packed pages: names, shapes and meaning are FlashMLA's for its sparse FP8 path.

    Args:
        q: bf16 ``[b, s_q, h, 512]``, any strides with a contiguous last dimension; h is 16, 32, 64 or 128.
        k_cache: uint8, int8 or float8_e4m3fn ``[pages, page, 1, 584]``, pages may be strided, any page size.
        block_table, cache_seqlens, num_splits: must be None on the sparse path.
        head_dim_v: 512.
        tile_scheduler_metadata: from ``get_mla_metadata``, or None; not read.
        softmax_scale: multiplies q . k; None means 512 ** -0.5.
        causal: must be False: the index lists are all the mask there is.
        is_fp8_kvcache: must be True.
        indices: int32 ``[b, s_q, topk]``, slots ``page * page_size + entry``; values outside the cache are ignored.
        attn_sink: fp32 ``[h]``: a key of that score whose value is zero; None means none.
        extra_k_cache, extra_indices_in_kvcache: a second list, with its own page size and width; both or neither.
        topk_length, extra_topk_length: int32 ``[b]``, entries of each list that count, clamped to [0, width]; None
            means the full width.
        out: bf16 ``[b, s_q, h, 512]``, written in place.

    Returns:
        ``(out, lse)``: bf16 ``[b, s_q, h, 512]`` and fp32 ``[b, h, s_q]``, the natural log over the keys without the
        sink. A row without keys gives zeros and +inf, with or without a sink.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument, before anything is launched.
    """
    _refuse_dense(block_table, cache_seqlens, num_splits, causal, is_fp8_kvcache, head_dim_v, indices)
    check_q(WHO, q, "b, s_q, h")
    leading = q.shape[:2]
    main = check_list(WHO, "k_cache", "indices", "topk_length", k_cache, indices, topk_length, leading, q.device)
    extra = None
    if extra_k_cache is not None or extra_indices_in_kvcache is not None or extra_topk_length is not None:
        extra = check_list(
            WHO, "extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length",
            extra_k_cache, extra_indices_in_kvcache, extra_topk_length, leading, q.device,
        )  # fmt: skip
    check_sink(WHO, "attn_sink", attn_sink, q)
    out = check_out(WHO, "out", out, q)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
    scale = HEAD_DIM**-0.5 if softmax_scale is None else float(softmax_scale)
    launch(q, main, extra, attn_sink, scale, out, lse.transpose(1, 2))
    return out, lse


def kernel_choice(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    out: torch.Tensor | None = None,
) -> Choice:
    """Which kernel ``flash_mla_with_kvcache`` takes for these arguments, and why: see ``choice``. Launches nothing."""
    leading = q.shape[:2]
    main = check_list(WHO, "k_cache", "indices", "topk_length", k_cache, indices, None, leading, q.device)
    extra = None
    if extra_k_cache is not None:
        extra = check_list(
            WHO, "extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length",
            extra_k_cache, extra_indices_in_kvcache, None, leading, q.device,
        )  # fmt: skip
    scale = HEAD_DIM**-0.5 if softmax_scale is None else float(softmax_scale)
    return choose(target_of(q.device).name, q, main, extra, scale, q if out is None else out)


def _refuse_dense(
    block_table: object, cache_seqlens: object, num_splits: object, causal: bool, is_fp8_kvcache: bool,
    head_dim_v: int, indices: object,
) -> None:  # fmt: skip
    """The rest of FlashMLA's interface (dense MLA, BF16 caches, other head sizes) is not here."""
    for name, value in (("block_table", block_table), ("cache_seqlens", cache_seqlens), ("num_splits", num_splits)):
        if value is not None:
            raise NotImplementedError(
                f"{WHO}: {name} must be None: only the sparse path is supported, where indices and topk_length say "
                f"what a row attends; got {type(value).__name__}"
            )
    if causal:
        raise NotImplementedError(f"{WHO}: causal must be False: the index lists are the mask; got {causal!r}")
    if not is_fp8_kvcache:
        raise NotImplementedError(
            f"{WHO}: is_fp8_kvcache must be True: only packed pages of 584 bytes a token are supported; got "
            f"{is_fp8_kvcache!r}"
        )
    if head_dim_v != HEAD_DIM:
        raise ValueError(f"{WHO}: head_dim_v must be {HEAD_DIM}, got {head_dim_v!r}")
    if indices is None:
        raise NotImplementedError(f"{WHO}: indices must be given: only the sparse path is supported; got None")
