"""What a forward gives its attention kernel, and the two calls that run one.

``attend`` and ``attend_prefill`` have FlashMLA's shapes, so that any kernel with such a function can take their place.
"""

from __future__ import annotations

from inspect import Parameter, isfunction, signature
from typing import TYPE_CHECKING

import torch

from dsv4_triton.arguments import KeyList
from dsv4_triton.attention import launch
from dsv4_triton.beyond_lengths import with_keys_beyond
from dsv4_triton.flash_mla import flash_mla_with_kvcache
from dsv4_triton.geometry import HEAD_DIM
from dsv4_triton.kernel_paths import CALLS, kernel_paths
from dsv4_triton.sparse_prefill import SparsePrefillCache, SparsePrefillWorkspace, combined_indices
from dsv4_triton.store import unpack

if TYPE_CHECKING:
    from types import FunctionType

    from torch import Tensor

    from dsv4_triton.cache import KVCache
    from dsv4_triton.metadata import DSV4AttnMetadata
    from dsv4_triton.runner import ForwardBatch


class AttentionCalls:
    """The forward over pages (all modes) and over the sparse-prefill workspace (EXTEND); mixed into the backend."""

    cache: KVCache
    workspace: SparsePrefillWorkspace
    softmax_scale: float
    #: whether lists are handed over with live slots past their lengths; never in production
    _keys_beyond_lengths = False

    def put_keys_beyond_lengths(self) -> None:
        """From now on hand ``attend`` and ``attend_prefill`` live slots past every length: see ``beyond_lengths``.

        For tests: answers must stay the same, bit for bit. Before a capture, not after it.
        """
        self._keys_beyond_lengths = True

    def sparse_prefill_cache(self, batch: ForwardBatch) -> SparsePrefillCache:
        raise NotImplementedError

    @classmethod
    def kernel_paths(cls, device: str) -> tuple[dict[str, str], ...]:
        """Which kernel serves which call on ``device``, and why; a call that a subclass overrides is served by that."""
        own = {method: getattr(cls, method) is getattr(AttentionCalls, method) for method in CALLS}
        served = [
            path
            for path in kernel_paths(device)
            if all(own[method] or path["call"].partition("/")[0] != call for method, call in CALLS.items())
        ]
        for method, call in CALLS.items():
            if not own[method]:
                owner = next(base for base in cls.__mro__ if method in vars(base)).__qualname__
                served.append({"call": call, "kernel": f"{owner}.{method}", "why": f"{owner} overrides {method}"})
        return tuple(served)

    def _forward_paged(
        self, q: Tensor, core: DSV4AttnMetadata, ratio: int, sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        rows = q.shape[0]
        extra: tuple[Tensor, Tensor, Tensor] | tuple[()] = ()
        if ratio != 0:
            indices, lengths = core.compressed_lists(ratio, "forward")
            extra = (
                self.cache.compressed[ratio].view(),
                *self._list(match_rows(indices, rows, -1), match_rows(lengths, rows, 1)),
            )
        answer = self.attend(
            q.unsqueeze(1),
            self.cache.swa.view(),
            *self._list(match_rows(core.swa_page_indices, rows, 0), match_rows(core.swa_topk_lengths, rows, 1)),
            sink,
            *extra,
        )
        heads = q.shape[1]
        out, lse = self._checked("attend", answer, [rows, 1, heads, HEAD_DIM], [rows, heads, 1])
        return out.squeeze(1), lse.squeeze(-1)

    def _forward_sparse_prefill(
        self, q: Tensor, batch: ForwardBatch, core: DSV4AttnMetadata, ratio: int, sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        cache = self.sparse_prefill_cache(batch)
        indices, lengths, compressed = combined_indices(core, cache, ratio)
        workspace = self.workspace.get(compressed + cache.swa_token_ids.shape[0])
        if ratio != 0:
            unpack(self.cache.compressed[ratio], cache.regions[ratio].slots, workspace[:compressed, 0])
        unpack(self.cache.swa, cache.swa_token_ids, workspace[compressed:, 0])
        rows, heads, _ = q.shape
        answer = self.attend_prefill(
            q, workspace, *self._list(match_rows(indices, rows, -1), match_rows(lengths, rows, 0)), sink
        )
        return self._checked("attend_prefill", answer, [rows, heads, HEAD_DIM], [rows, heads])

    def _list(self, indices: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Slots ``[T, 1, W]`` and lengths ``[T]`` as a call is given them."""
        listed = indices.unsqueeze(1)
        return (with_keys_beyond(listed, lengths) if self._keys_beyond_lengths else listed), lengths

    def __init_subclass__(cls) -> None:
        """TypeError for a call, its own or a mixin's, that cannot be called as this class calls it."""
        super().__init_subclass__()
        for method in CALLS:
            if isfunction(own := getattr(cls, method)):
                _check_signature(f"{cls.__qualname__}.{method}", own, getattr(AttentionCalls, method))

    def _checked(self, method: str, answer: object, out: list[int], lse: list[int]) -> tuple[Tensor, Tensor]:
        """``answer`` of a call that a subclass may override; TypeError unless it is ``(out, lse)`` of these shapes."""
        owed = [(torch.bfloat16, out), (torch.float32, lse)]
        if isinstance(answer, (tuple, list)) and len(answer) == 2:
            found = [(part.dtype, list(part.shape)) if isinstance(part, torch.Tensor) else None for part in answer]
            if found == owed:
                return answer[0], answer[1]
        got = ", ".join(map(_described, answer)) if isinstance(answer, (tuple, list)) else _described(answer)
        raise TypeError(
            f"{type(self).__qualname__}.{method} must return (out, lse), torch.bfloat16 {out} and torch.float32 {lse}; "
            f"got {got or 'nothing'}"
        )

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        indices: Tensor,
        topk_length: Tensor,
        attn_sink: Tensor | None,
        extra_k_cache: Tensor | None = None,
        extra_indices: Tensor | None = None,
        extra_topk_length: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """FlashMLA's sparse FP8 call; override it to run another kernel over these pools and this metadata.

        ``q`` bf16 ``[T, 1, H, 512]``; caches uint8 ``[pages, entries, 1, 584]`` over strided pages; indices int32
        ``[T, 1, W]``, -1 where absent; lengths int32 ``[T]``. Returns out bf16 ``[T, 1, H, 512]`` and lse fp32
        ``[T, H, 1]``.
        """
        return flash_mla_with_kvcache(
            q,
            k_cache,
            None,
            None,
            HEAD_DIM,
            None,
            softmax_scale=self.softmax_scale,
            is_fp8_kvcache=True,
            indices=indices,
            attn_sink=attn_sink,
            extra_k_cache=extra_k_cache,
            extra_indices_in_kvcache=extra_indices,
            topk_length=topk_length,
            extra_topk_length=extra_topk_length,
        )

    def attend_prefill(
        self, q: Tensor, kv: Tensor, indices: Tensor, topk_length: Tensor, attn_sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """FlashMLA's sparse prefill call: ``q`` bf16 ``[T, H, 512]``, ``kv`` bf16 ``[N, 1, 512]``, indices int32
        ``[T, 1, W]``, lengths int32 ``[T]``. Returns out bf16 ``[T, H, 512]`` and lse fp32 ``[T, H]``."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        keys = KeyList(kv[:, 0], indices, topk_length)
        launch(q.unsqueeze(1), keys, None, attn_sink, self.softmax_scale, out.unsqueeze(1), lse.unsqueeze(1))
        return out, lse


def _described(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _check_signature(name: str, own: FunctionType, declared: FunctionType) -> None:
    """TypeError unless ``own`` takes what ``declared`` takes by position, with and without what has a default there."""
    parameters = list(signature(declared).parameters.values())
    needed = [parameter for parameter in parameters if parameter.default is Parameter.empty]
    for given in (needed, parameters):
        try:
            signature(own).bind(*given)
        except TypeError as error:
            said = ", ".join(parameter.name for parameter in given)
            raise TypeError(f"{name}{signature(own)} is called as {name}({said}): {error}") from None


def match_rows(values: Tensor, rows: int, fill: int) -> Tensor:
    """Metadata of exactly ``rows`` rows: cut off, or padded with ``fill`` (q padded after the metadata was built)."""
    have = values.shape[0]
    if have == rows:
        return values
    if have > rows:
        return values[:rows]
    return torch.cat([values, values.new_full((rows - have, *values.shape[1:]), fill)])
