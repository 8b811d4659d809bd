"""The Triton backend with one defect each in verify, draft extend or drafting; see ``wrong_triton``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from dsv4_triton import DSV4TritonBackend
from dsv4_triton.multi_step import DSV4TritonMultiStepBackend
from torch import Tensor
from wrong_triton import FilledMetadata


class VerifyRowsShareFirstLength(FilledMetadata):
    """All draft rows of a request see what its first row sees."""

    def spoil(self, core: Any) -> None:
        rows = self.runner.speculative_num_draft_tokens
        if rows < 2 or core.rows % rows:
            return
        first = torch.arange(core.rows, device=core.page_table.device) // rows * rows
        for name in ("seq_lens_casual", "swa_page_indices", "swa_topk_lengths"):
            value = getattr(core, name)
            value.copy_(value[first])


class RaggedVerifyAsUniform(DSV4TritonBackend):
    """Every request gets the mean number of draft rows."""

    def init_forward_metadata(self, batch: Any) -> None:
        if batch.verify_lens is not None:
            mean = batch.out_cache_loc.shape[0] // batch.batch_size
            batch = replace(batch, verify_lens=None, draft_token_num=mean)
        super().init_forward_metadata(batch)


class EmittedByLastRowOnly(FilledMetadata):
    """Which entries a verify stores is decided from each request's final length."""

    def spoil(self, core: Any) -> None:
        rows = self.runner.speculative_num_draft_tokens
        if rows < 2 or core.rows % rows or core.c4_out_loc is None:
            return
        inner = torch.arange(core.rows, device=core.page_table.device) % rows != rows - 1
        for name in ("c4_out_loc", "c128_out_loc"):
            getattr(core, name).masked_fill_(inner, -1)


class FirstWriteKept(DSV4TritonBackend):
    """Sound; finds the slots of a step that some step wrote before."""

    def written_before(self, pool: str, slots: Tensor) -> Tensor:
        seen: Tensor = self.__dict__.setdefault(f"_seen_{pool}", torch.zeros(1 << 16, dtype=torch.bool))
        again = (slots > 0) & seen.to(slots.device)[slots.clamp(min=0).long()]
        seen[slots.cpu().clamp(min=0).long()] = True
        return again


class RejectedTokenKept(FirstWriteKept):
    """A window slot that holds a rejected draft is taken for filled."""

    def store_kv(self, batch: Any, k: Tensor) -> None:
        slots = self.get_swa_out_cache_loc(batch)
        slots.masked_fill_(self.written_before("swa", slots), 0)
        super().store_kv(batch, k)


class RejectedEntryKept(FirstWriteKept):
    """A compressed entry that a rejected draft completed is taken for complete."""

    def store_compressed(self, batch: Any, compress_ratio: int, entries: Tensor) -> None:
        slots = self.core_metadata("store_compressed").compressed_out_loc(compress_ratio, "store_compressed")
        slots.masked_fill_(self.written_before(f"c{compress_ratio}", slots), -1)
        super().store_compressed(batch, compress_ratio, entries)


class DraftPositionsNotAdvanced(DSV4TritonBackend):
    """Every draft step decodes at the committed length."""

    @classmethod
    def multi_step(cls, runner: Any, *, num_steps: int, compress_ratio: int = 0) -> DSV4TritonMultiStepBackend:
        return _NotAdvanced(cls, runner, num_steps=num_steps, compress_ratio=compress_ratio)


class _NotAdvanced(DSV4TritonMultiStepBackend):
    def step_batch(self, batch: Any, step: int) -> Any:
        sound = super().step_batch(batch, step)
        sound.seq_lens = sound.seq_lens - step
        sound.positions = sound.positions - step
        return sound


class DraftSlotsStepMajor(DSV4TritonBackend):
    """The flat write locations of a draft are read step-major, though they are request-major."""

    @classmethod
    def multi_step(cls, runner: Any, *, num_steps: int, compress_ratio: int = 0) -> DSV4TritonMultiStepBackend:
        return _StepMajor(cls, runner, num_steps=num_steps, compress_ratio=compress_ratio)


class _StepMajor(DSV4TritonMultiStepBackend):
    def step_batch(self, batch: Any, step: int) -> Any:
        sound = super().step_batch(batch, step)
        sound.out_cache_loc = batch.out_cache_loc.view(self.num_steps, -1)[step].contiguous()
        return sound


class DraftExtendPrefixOnly(FilledMetadata):
    """Draft-extend rows are placed behind the prefix as if their own tokens did not count."""

    def spoil(self, core: Any) -> None:
        if core.c4_out_loc is None and core.rows:
            core.swa_topk_lengths.copy_((core.swa_topk_lengths - 1).clamp(min=0))


class DraftStepsShareMetadata(DSV4TritonBackend):
    """All steps of a captured chain read the same static inputs."""

    @classmethod
    def multi_step(cls, runner: Any, *, num_steps: int, compress_ratio: int = 0) -> DSV4TritonMultiStepBackend:
        return _Shared(cls, runner, num_steps=num_steps, compress_ratio=compress_ratio)


class _Shared(DSV4TritonMultiStepBackend):
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        first, *later = self.attn_backends
        for backend in later:
            backend.graph_state = first.graph_state


class DraftExtendAsUniform(DSV4TritonBackend):
    """Every request gets the mean number of accepted rows."""

    def init_forward_metadata(self, batch: Any) -> None:
        if batch.extend_seq_lens is not None:
            mean = batch.out_cache_loc.shape[0] // batch.batch_size
            batch = replace(batch, extend_seq_lens=torch.full_like(batch.extend_seq_lens, mean))
        super().init_forward_metadata(batch)


class LengthsReadOnTheHost(DSV4TritonBackend):
    """Lengths that only the device knows are fetched."""

    def init_forward_metadata(self, batch: Any) -> None:
        super().init_forward_metadata(replace(batch, seq_lens_cpu=batch.seq_lens.tolist()))

    def init_forward_metadata_out_graph(self, batch: Any, *, in_capture: bool = False) -> None:
        known = replace(batch, seq_lens_cpu=batch.seq_lens.tolist())
        super().init_forward_metadata_out_graph(known, in_capture=in_capture)
