"""Breakable CUDA graphs: pieces are captured, attention runs between them on refreshed captured metadata.

Off unless an engine asks for it (``use_captured_forward_metadata_for_breakable_cuda_graph`` tells it that it may):
the extend columns of the matrix stay not-applicable, since EXTEND has no graph bucket.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

from dsv4_triton.forward_metadata import DSV4Metadata
from dsv4_triton.rows import eager_layout
from dsv4_triton.runner import EXTEND, TARGET_VERIFY
from dsv4_triton.sparse_prefill import BIG_QUERY_ROWS, SparsePrefillCache, build_cache

if TYPE_CHECKING:
    from dsv4_triton.rows import RowLayout
    from dsv4_triton.runner import ForwardBatch, RunnerConfig


class SharedReadEnds(StrEnum):
    """When a forward has read the last of what the scheduler may change (``req_to_token``, slot maps)."""

    UNKNOWN = "unknown"
    PRE_REPLAY = "pre_replay"
    POST_REPLAY = "post_replay"


class BreakableGraphSupport:
    """The replay contract of breakable graphs and the chunk cache it may snapshot; mixed into the backend."""

    use_captured_forward_metadata_for_breakable_cuda_graph = True
    #: whether the scheduler waits for the shared reads of a prefill; set by an engine that overlaps them
    prefill_war_read_done = False

    runner: RunnerConfig
    forward_metadata: object

    def build_metadata(self, layout: RowLayout) -> DSV4Metadata:
        raise NotImplementedError

    @property
    def max_context_len(self) -> int:
        """Tokens that a request can have: the width of ``req_to_token``."""
        return self.runner.req_to_token.shape[1]

    def prepare_forward_metadata_for_breakable_cuda_graph_replay(
        self,
        capture_metadata: DSV4Metadata,
        live_batch: ForwardBatch,
        *,
        static_forward_batch: ForwardBatch | None = None,
    ) -> None:
        """Refresh captured metadata for a replay and make it current.

        Metadata is built once, from the static batch (the live one if there is none), as wide as at capture.
        AssertionError if ``capture_metadata`` is no ``DSV4Metadata`` or its extents differ.
        """
        if not isinstance(capture_metadata, DSV4Metadata):
            raise AssertionError(
                f"DSV4TritonBackend: breakable replay got captured metadata of type {type(capture_metadata).__name__}; "
                "expected DSV4Metadata"
            )
        batch = live_batch if static_forward_batch is None else static_forward_batch
        layout = eager_layout(batch, self.max_context_len, self.runner.speculative_num_draft_tokens)
        fresh = self.build_metadata(replace(layout, max_seq_len=self.max_context_len))
        capture_metadata.refresh_for_breakable_cuda_graph_replay_(fresh)
        self.forward_metadata = capture_metadata

    def shared_read_ends(self, forward_mode: str) -> SharedReadEnds:
        """When the shared reads of a replay of this mode end."""
        if forward_mode == TARGET_VERIFY:
            return SharedReadEnds.POST_REPLAY
        metadata = self.forward_metadata
        if forward_mode == EXTEND and isinstance(metadata, DSV4Metadata) and metadata.prefill_shared_reads_snapshotted:
            return SharedReadEnds.PRE_REPLAY
        return SharedReadEnds.UNKNOWN

    def prepare_prefill_shared_read_snapshot(self, batch: ForwardBatch, num_qo_tokens: int) -> None:
        """Read everything shared before the replay starts, if an engine waits for that; flag it only if it worked."""
        metadata = self.forward_metadata
        if not isinstance(metadata, DSV4Metadata):
            return
        metadata.prefill_shared_reads_snapshotted = False
        if not self.prefill_war_read_done or batch.forward_mode != EXTEND:
            return
        path = self.runner.prefill_path
        if path == "sparse" or (path == "auto" and num_qo_tokens > BIG_QUERY_ROWS):
            metadata.sparse_prefill_cache = self.build_sparse_prefill_cache(batch, num_qo_tokens=num_qo_tokens)
        metadata.prefill_shared_reads_snapshotted = True

    def sparse_prefill_cache(self, batch: ForwardBatch) -> SparsePrefillCache:
        """The chunk cache of the current forward: built by its first sparse layer, shared by the others."""
        metadata = self._built_metadata()
        if metadata.sparse_prefill_cache is None:
            metadata.sparse_prefill_cache = self.build_sparse_prefill_cache(
                batch, num_qo_tokens=metadata.core_attn_metadata.rows
            )
        return metadata.sparse_prefill_cache

    def build_sparse_prefill_cache(self, batch: ForwardBatch, *, num_qo_tokens: int) -> SparsePrefillCache:
        """A new chunk cache for ``num_qo_tokens`` rows of ``batch``."""
        layout = self._built_metadata().layout
        if layout is None:
            raise AssertionError("DSV4TritonBackend: sparse prefill needs metadata that was built from a batch")
        runner = self.runner
        return build_cache(
            replace(layout, rows=num_qo_tokens), batch, runner.req_to_token, runner.full_to_swa_index_mapping
        )

    def _built_metadata(self) -> DSV4Metadata:
        if not isinstance(self.forward_metadata, DSV4Metadata):
            raise RuntimeError("DSV4TritonBackend: no forward metadata; call init_forward_metadata first")
        return self.forward_metadata
