"""The attention backend: pools, metadata, graph state and the forward of one model runner.

A step, eager or captured, is metadata, ``store_kv``, ``store_compressed``, ``write_c4_selection``, ``forward``.
A kernel author with a FlashMLA-shaped function subclasses ``DSV4TritonBackend`` and overrides ``attend``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dsv4_triton import determinism, refusals
from dsv4_triton.accumulators import Accumulators
from dsv4_triton.attention_calls import AttentionCalls, match_rows
from dsv4_triton.breakable import BreakableGraphSupport
from dsv4_triton.cache import KVCache
from dsv4_triton.forward_metadata import DSV4Metadata, RawMetadata
from dsv4_triton.graph_state import CapturedStep, GraphState
from dsv4_triton.metadata import DSV4AttnMetadata
from dsv4_triton.metadata_kernels import build_attn_metadata, fill_attn_metadata, swa_slots, write_c4_selection
from dsv4_triton.multi_step import DSV4TritonMultiStepBackend
from dsv4_triton.rows import RowLayout, eager_layout
from dsv4_triton.runner import is_idle
from dsv4_triton.sparse_prefill import SparsePrefillWorkspace, takes_sparse_path
from dsv4_triton.store import pack_and_store

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from torch import Tensor

    from dsv4_triton.runner import ForwardBatch, RunnerConfig


class DSV4TritonBackend(BreakableGraphSupport, AttentionCalls, Accumulators):
    """DeepSeek-V4 sparse attention of one model runner.

    Args:
        runner: geometry, tables and settings; its tensors are read at every step, never copied across steps.
        cache: pools to share with another backend of the same runner (draft steps); own ones by default.

    Raises:
        AssertionError, ValueError, NotImplementedError: for a runner that is not supported, see ``refusals``.
    """

    #: which kernel paths may be part of a deterministic run, and where
    DETERMINISM = determinism.DETERMINISM

    def __init__(self, runner: RunnerConfig, cache: KVCache | None = None) -> None:
        refusals.check_runner(runner)
        self.runner = runner
        self.num_heads = runner.num_heads
        self.softmax_scale = runner.softmax_scale
        self.cache = cache or KVCache(runner)
        self.workspace = SparsePrefillWorkspace(runner.req_to_token.device)
        self.graph_state: GraphState | None = None
        self.forward_metadata: DSV4Metadata | RawMetadata | None = None
        self._captured: CapturedStep | None = None
        #: whether the current metadata was filled by the in-graph part, so that an idle rank's is safe to use
        self._in_graph = False

    @classmethod
    def multi_step(
        cls, runner: RunnerConfig, *, num_steps: int, compress_ratio: int = 0
    ) -> DSV4TritonMultiStepBackend[Self]:
        """One backend a draft step over shared pools. ValueError for ratio 4 or 128: the draft layer is SWA-only."""
        return DSV4TritonMultiStepBackend(cls, runner, num_steps=num_steps, compress_ratio=compress_ratio)

    # pools

    def kv_buffers(self) -> Mapping[str, Tensor]:
        """The raw uint8 buffers that hold all cache bytes: ``swa``, ``c4`` and ``c128``."""
        return self.cache.buffers()

    def set_key_buffer(self, loc: Tensor, k: Tensor) -> None:
        """Store ``k`` bf16 ``[N, 512]`` at full locations ``loc`` ``[N]``; locations <= 0 are skipped."""
        refusals.check_locations(loc, "set_key_buffer")
        refusals.check_rows(k, loc.shape[0], "set_key_buffer")
        self._check_device("k", k, "set_key_buffer")
        self._check_device("loc", loc, "set_key_buffer")
        pack_and_store(k, loc, self.cache.swa, mapping=self.runner.full_to_swa_index_mapping)

    def set_extra_key_buffer(self, compress_ratio: int, loc: Tensor, entries: Tensor) -> None:
        """Store ``entries`` bf16 ``[N, 512]``, each at the full location of its last token; <= 0 is skipped."""
        refusals.check_compressed_ratio(compress_ratio, "set_extra_key_buffer")
        refusals.check_locations(loc, "set_extra_key_buffer")
        refusals.check_rows(entries, loc.shape[0], "set_extra_key_buffer")
        self._check_device("entries", entries, "set_extra_key_buffer")
        self._check_device("loc", loc, "set_extra_key_buffer")
        pack_and_store(entries, loc, self.cache.compressed[compress_ratio], ratio=compress_ratio)

    # metadata

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Eager metadata for ``batch``. Never waits for the device; without host lengths the table is full width."""
        refusals.check_eager_mode(batch)
        self._check_batch(batch, "init_forward_metadata")
        layout = eager_layout(batch, self.max_context_len, self.runner.speculative_num_draft_tokens)
        metadata = self.build_metadata(layout)
        self._captured, self._in_graph = None, False
        self.forward_metadata = metadata

    def _check_batch(self, batch: ForwardBatch, where: str) -> None:
        for name in ("seq_lens", "req_pool_indices", "out_cache_loc", "extend_seq_lens", "verify_lens"):
            tensor = getattr(batch, name)
            if tensor is not None:
                refusals.check_integers(name, tensor, where)
                self._check_device(name, tensor, where)

    def _check_device(self, name: str, tensor: Tensor, where: str) -> None:
        refusals.check_device(name, tensor, self.runner.req_to_token.device, where)

    def build_metadata(self, layout: RowLayout) -> DSV4Metadata:
        """New metadata of ``layout``; not made current."""
        runner = self.runner
        core = build_attn_metadata(layout, runner.req_to_token, runner.full_to_swa_index_mapping, runner.index_topk)
        return DSV4Metadata.over(core, layout)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate for graphs of up to ``max_bs`` requests and ``max_num_tokens`` rows; forgets earlier captures.

        Draft-extend graphs have ``max_num_tokens // max_bs`` rows a request.
        """
        self.graph_state = GraphState(self.runner, max_bs, max_num_tokens)
        self._captured, self._in_graph = None, False

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, *, in_capture: bool = False) -> None:
        """Before a capture, choose and reset the step's static inputs; before a replay, copy ``batch`` into them.

        NotImplementedError for a mode without a bucket; AssertionError for a batch that no captured graph holds.
        """
        refusals.graph_bucket(batch)
        self._check_batch(batch, "init_forward_metadata_out_graph")
        if self.graph_state is None:
            raise RuntimeError(
                f"{refusals.ACTOR}.init_forward_metadata_out_graph: no graph state; call init_cuda_graph_state first"
            )
        step = self.graph_state.capture(batch) if in_capture else self.graph_state.prepare_replay(batch)
        self._captured, self._in_graph = step, False
        self.forward_metadata = step.raw if in_capture else step.metadata

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """The recorded part: fill the captured metadata from the static inputs. Eagerly, the same as building it."""
        step = self._captured
        if step is None:
            self.init_forward_metadata(batch)
            return
        runner = self.runner
        core = step.metadata.core_attn_metadata
        fill_attn_metadata(core, step.layout, runner.req_to_token, runner.full_to_swa_index_mapping)
        self.forward_metadata, self._in_graph = step.metadata, True

    @property
    def has_static_inputs(self) -> bool:
        """Whether the current step is that of a graph, which reads inputs of its own and not its batch."""
        return self._captured is not None

    def on_after_cuda_graph_warmup(self) -> None:
        """Between warm-up and capture: fresh scheduler objects, and the raw inputs again, so the capture upgrades."""
        if self._captured is not None:
            self._captured.metadata.core_attn_metadata.reset_flashmla_metadata()
            self.forward_metadata, self._in_graph = self._captured.raw, False

    def core_metadata(self, where: str) -> DSV4AttnMetadata:
        """Current core metadata.

        RuntimeError before any was initialised, or where a capture skipped the upgrade; NotImplementedError for the
        metadata of another backend.
        """
        metadata = self.forward_metadata
        if not isinstance(metadata, DSV4Metadata):
            raise RuntimeError(
                f"{refusals.ACTOR}.{where}: the current metadata is {type(metadata).__name__}; expected DSV4Metadata. "
                "Call init_forward_metadata, or in a graph init_forward_metadata_in_graph, first"
            )
        core = metadata.core_attn_metadata
        if not isinstance(core, DSV4AttnMetadata):
            refusals.refuse_ragged_attention(core, where)
        return core

    # the step

    def get_swa_out_cache_loc(self, batch: ForwardBatch) -> Tensor:
        """int32 ``[T]``, SWA slot that each row of ``batch`` writes.

        The metadata's own tensor if it has as many rows as ``out_cache_loc`` and the rank is not idle; translated
        anew otherwise (padded by data parallelism after the metadata was built, idle, or no metadata yet).
        """
        metadata = self.forward_metadata
        cached = metadata.core_attn_metadata.swa_out_cache_loc if isinstance(metadata, DSV4Metadata) else None
        if cached is not None and not self._is_stale(batch) and cached.shape[0] == batch.out_cache_loc.shape[0]:
            return cached
        return swa_slots(self.runner.full_to_swa_index_mapping, batch.out_cache_loc)

    def _is_stale(self, batch: ForwardBatch) -> bool:
        """Whether the current metadata may be that of an earlier batch: an engine skips the metadata of an idle rank.

        The in-graph part never is: the replay of an idle rank has pad inputs, and a captured step must not depend on
        what its batch happened to be at capture.
        """
        return is_idle(batch) and not self._in_graph

    def store_kv(self, batch: ForwardBatch, k: Tensor) -> None:
        """Pack ``k`` bf16 ``[T, 512]`` into the SWA pool; pad rows and an idle rank write nothing."""
        refusals.check_rows(k, batch.out_cache_loc.shape[0], "store_kv")
        self._check_device("k", k, "store_kv")
        if not self._is_stale(batch):
            pack_and_store(k, self.get_swa_out_cache_loc(batch), self.cache.swa)

    def store_compressed(self, batch: ForwardBatch, compress_ratio: int, entries: Tensor) -> None:
        """Pack ``entries`` bf16 ``[T, 512]`` where a row completes a group of the ratio; other rows write nothing."""
        refusals.check_compressed_ratio(compress_ratio, "store_compressed")
        rows = batch.out_cache_loc.shape[0]
        refusals.check_rows(entries, rows, "store_compressed")
        self._check_device("entries", entries, "store_compressed")
        if self._is_stale(batch):
            return
        slots = self.core_metadata("store_compressed").compressed_out_loc(compress_ratio, "store_compressed")
        pack_and_store(entries, match_rows(slots, rows, -1), self.cache.compressed[compress_ratio], sparse=True)

    def write_c4_selection(self, raw: Tensor) -> None:
        """The indexer's choice, int32 ``[T, index_topk]`` request-local entry ids, into the C4 page indices."""
        core = self.core_metadata("write_c4_selection")
        core.compressed_lists(4, "write_c4_selection")
        refusals.check_selection(raw, core.index_topk)
        self._check_device("the selection", raw, "write_c4_selection")
        write_c4_selection(core, raw)

    def forward(
        self, q: Tensor, batch: ForwardBatch, compress_ratio: int, attn_sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attention of ``q`` bf16 ``[T, H, 512]``, sink fp32 ``[H]``.

        Returns bf16 ``[T, H, 512]`` and lse fp32 ``[T, H]``: natural log without the sink, +inf for a row without
        keys, whose output is zero. All rows of an idle rank are such rows.
        """
        refusals.check_ratio(compress_ratio, "forward")
        refusals.check_query(q, self.num_heads)
        attn_sink = refusals.check_sink(attn_sink, self.num_heads)
        self._check_device("q", q, "forward")
        self._check_device("attn_sink", attn_sink, "forward")
        if self._is_stale(batch):
            return torch.zeros_like(q), q.new_full(q.shape[:2], float("inf"), dtype=torch.float32)
        core = self.core_metadata("forward")
        if compress_ratio != 0:
            core.compressed_lists(compress_ratio, "forward")
        if q.shape[0] == 0:
            return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        if takes_sparse_path(batch, q.shape[0], self.runner.prefill_path):
            return self._forward_sparse_prefill(q, batch, core, compress_ratio, attn_sink)
        return self._forward_paged(q, core, compress_ratio, attn_sink)
