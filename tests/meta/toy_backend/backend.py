"""The backend itself: stores, selection and attention of a step, and what it refuses."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .defects import DEFECTS
from .metadata import ToyMetadata
from .multi_step import ToyMultiStep

PAGE = 256


class ToyBackend(ToyMetadata):
    """Shapes, names and errors are those of ``dsv4_matrix.protocol.AttentionBackend``."""

    def __init__(self, runner: Any, pools: dict[str, Tensor] | None = None) -> None:
        if not self.has("refuses_nothing"):
            self._check_runner(runner)
        super().__init__(runner, pools)
        self._previous: Tensor | None = None
        self._dead = False

    @classmethod
    def multi_step(cls, runner: Any, *, num_steps: int, compress_ratio: int = 0) -> ToyMultiStep:
        if compress_ratio != 0:
            cls._refuse(ValueError, f"draft layer is SWA-only: no draft runner for compress_ratio={compress_ratio}")
        return ToyMultiStep(cls, runner, num_steps)

    def _check_runner(self, runner: Any) -> None:
        if runner.page_size != PAGE:
            self._refuse(AssertionError, f"the packed format hardcodes page_size=256, got {runner.page_size}")
        if runner.head_dim != 512:
            self._refuse(AssertionError, f"head_dim is {runner.head_dim}, must be 512")
        if runner.swa_page_size not in (128, 256):
            self._refuse(AssertionError, f"swa_page_size is {runner.swa_page_size}, must be 256 or 128")
        if runner.num_heads not in (16, 32, 64, 128):
            self._refuse(ValueError, f"num_heads is {runner.num_heads}, must be 16, 32, 64 or 128")
        if runner.index_topk not in (512, 1024):
            self._refuse(AssertionError, f"index_topk is {runner.index_topk}, must be 512 or 1024")
        if runner.speculative_eagle_topk not in (0, 1):
            self._refuse(AssertionError, f"Topk > 1 not supported, got {runner.speculative_eagle_topk}")
        if runner.context_parallel_size != 1:
            self._refuse(NotImplementedError, f"context_parallel_size is {runner.context_parallel_size}, must be 1")

    def store_kv(self, batch: Any, k: Tensor) -> None:
        self._store("swa", self._ready().swa_out, k)

    def store_compressed(self, batch: Any, compress_ratio: int, entries: Tensor) -> None:
        if compress_ratio not in (4, 128):
            self._refuse(AssertionError, f"compress_ratio {compress_ratio} has no compressed pool")
            return
        meta = self._ready()
        self._store(f"c{compress_ratio}", meta.c4_out if compress_ratio == 4 else meta.c128_out, entries)

    def write_c4_selection(self, raw: Tensor) -> None:
        if raw.shape[1] != self.runner.index_topk:
            wanted = f"int32 [T, {self.runner.index_topk}]"
            self._refuse(AssertionError, f"selection is {raw.shape[1]} wide, must be {wanted}")
            return
        meta, table = self._ready(), self._table()
        raw, complete = raw.long(), self._complete(meta.lens, 4)[:, None]
        if self.has("selection_ignored"):
            raw = complete - 1 - self._arange(raw.shape[1])
        if self.has("entry_early"):
            column = self._arange(raw.shape[1])[None, :]
            raw = torch.where(column == complete - 1, complete - 1, raw)
        valid = (raw >= 0) & (raw < complete)
        last = (torch.where(valid, raw, 0) * 4 + 3).clamp(max=table.shape[1] - 1)
        slots = torch.where(valid, table[meta.table_row[:, None], last] // 4, -1)
        if self.has("selection_not_reset"):
            if self._previous is None:
                self._previous = torch.full((512, slots.shape[1]), -1, device=slots.device)
            kept = self._previous[: len(slots)]
            slots = kept.copy_(torch.where(slots < 0, kept, slots))
        meta.c4.copy_(slots)

    def forward(self, q: Tensor, batch: Any, compress_ratio: int, attn_sink: Tensor) -> tuple[Tensor, Tensor]:
        with _disable_current_modes() if self.has("attention_outside_graph") else contextlib.nullcontext():
            return self._attend(q, batch, compress_ratio, attn_sink)

    def _attend(self, q: Tensor, batch: Any, compress_ratio: int, attn_sink: Tensor) -> tuple[Tensor, Tensor]:
        self._check_forward(q, batch, compress_ratio, attn_sink)
        if self.has("raises") or self._dead:
            raise RuntimeError("the toy backend fails on purpose")
        meta = self._ready()
        if self.has("table_written"):
            self.runner.req_to_token[0, 0] = 1
        indices = [("swa", meta.swa)]
        if compress_ratio:
            indices.append((f"c{compress_ratio}", meta.c4 if compress_ratio == 4 else meta.c128))
        keys, valid = [], []
        for name, slots in indices:
            present = slots >= 0
            if self.has("first_key_clamped"):
                present = torch.ones_like(present)
            keys.append(torch.where(present[..., None], self._load(name, slots.clamp(min=0)), 0.0))
            valid.append(present)
        k, present = torch.cat(keys, 1), torch.cat(valid, 1)
        if self.has("q_stride_ignored"):
            q = q.as_strided(q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1))
        # A batched product may sum in another order for another number of rows; in fp64 no rounded bit shows it.
        wide = torch.float64 if q.is_cuda else torch.float32
        k = k.to(wide)
        scores = torch.bmm(q.to(wide), k.transpose(1, 2)) * self.runner.softmax_scale
        if self.has("input_written"):
            q.neg_()
        scores = torch.where(present[:, None, :], scores, float("-inf"))
        top = scores.amax(-1, keepdim=True).clamp(min=-1e30)
        weight = torch.exp(scores - top)
        total = weight.sum(-1)
        lse = torch.where(total == 0, float("inf"), top[..., 0] + torch.log(total)).float()
        sink = attn_sink.roll(-1) if self.has("sink_of_next_head") else attn_sink
        bottom = total if self.has("sink_dropped") else total + torch.exp(sink[None, :] - top[..., 0])
        value = torch.cat([k[..., :448], k[..., 448:] * 0], -1) if self.has("rope_lost") else k
        out = torch.bmm(weight, value) / bottom[..., None]
        out = torch.where((total == 0)[..., None], 0.0, out)
        return self._spoiled(out.to(torch.bfloat16), lse, bottom, top[..., 0])

    def _spoiled(self, out: Tensor, lse: Tensor, bottom: Tensor, top: Tensor) -> Any:
        if self.has("lse_log2"):
            lse = lse * 1.4426950408889634
        if self.has("sink_in_lse"):
            lse = (torch.log(bottom) + top).float()
        if self.has("pad_leaks"):
            out = out + 0 * out.sum(0, keepdim=True)
        if self.has("nan_output") and out.numel():
            out[-1, -1, -1] = float("nan")
        if self.has("wrong_dtype"):
            out = out.float()
        if self.has("wrong_shape"):
            out = out[:, None]
        return out if self.has("lse_missing") else (out, lse)

    def _check_forward(self, q: Tensor, batch: Any, compress_ratio: int, attn_sink: Any) -> None:
        before = self._dead
        self._dead = before or self.has("dead_after_refusal")
        if compress_ratio not in (0, 4, 128):
            self._refuse(ValueError, f"invalid compress_ratio={compress_ratio}")
        if compress_ratio and batch.forward_mode == "draft_extend":
            self._refuse(ValueError, f"draft layer is SWA-only, got compress_ratio={compress_ratio}")
        if not isinstance(attn_sink, Tensor):
            self._refuse(AssertionError, "attn_sink is missing")
        elif attn_sink.dtype != torch.float32:
            self._refuse(TypeError, f"attn_sink is {attn_sink.dtype}, must be float32")
        if q.dtype != torch.bfloat16:
            self._refuse(TypeError, f"q is {q.dtype}, must be bf16")
        if q.shape[-1] != 512:
            self._refuse(ValueError, f"q is {q.shape[-1]} wide, must be 512")
        self._dead = before


def broken(*defects: str) -> type[ToyBackend]:
    """The toy with ``defects`` switched on; KeyError for a name that is not in ``DEFECTS``."""
    for defect in defects:
        DEFECTS[defect]
    return type("ToyBackend_" + "_".join(defects), (ToyBackend,), {"defects": frozenset(defects)})
