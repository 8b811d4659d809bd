"""The contracts between the harness, a backend and a reference, as typed values and Protocols.

A backend never imports this module: it is matched by structure (names, shapes, dtypes), so that an engine's own
classes can be put under test. Names are those of SGLang's DeepSeek-V4 backend. torch is needed for typing only.

Shapes: ``T`` query rows in the (padded) batch, ``bs`` requests, ``H`` query heads, 512 = head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


class ForwardMode(StrEnum):
    """How a batch expands into query rows. Values compare equal to plain strings, which is what a backend sees."""

    EXTEND = "extend"
    DECODE = "decode"
    TARGET_VERIFY = "target_verify"
    DRAFT_EXTEND = "draft_extend"
    IDLE = "idle"
    SPLIT_PREFILL = "split_prefill"  # exists to be refused: no backend of this model has metadata for it


@dataclass(frozen=True)
class RunnerConfig:
    """What a serving engine's model runner shows to an attention backend. Tensors are owned by the scheduler.

    The scheduler changes ``req_to_token`` and ``full_to_swa_index_mapping`` in place between steps and replays; a
    backend reads them at every step and never keeps a translated copy across steps.

    Attributes:
        device: torch device string, ``"cuda"`` or ``"cpu"``.
        num_heads: query heads, one of 16, 32, 64, 128.
        head_dim: 512; anything else is refused (AssertionError).
        page_size: full tokens a page, 256; anything else is refused (AssertionError).
        swa_page_size: SWA slots a page of the SWA pool, 256 or 128; anything else is refused (AssertionError).
        num_pages: full pages, the dummy page 0 included. C4 and C128 pools have the same page ids.
        num_swa_pages: pages of the SWA pool, the dummy page 0 included.
        req_to_token: int32 ``[max_requests, max_context_len]``, full location of (request row, position).
        full_to_swa_index_mapping: int64 ``[num_pages * 256 + 1]``, SWA slot of a full location; [0] = 0, [-1] = -1.
        index_topk: width of the C4 selection, 512 or 1024; anything else is refused (AssertionError).
        softmax_scale: multiplies q . k, 512 ** -0.5.
        prefill_path: ``"auto"`` (sparse above 11673 rows), ``"dense"`` or ``"sparse"``; read by EXTEND only.
        speculative_eagle_topk: 0 (off) or 1 (chain); above 1 is refused (AssertionError): tree speculation.
        speculative_num_draft_tokens: verify rows a request, the root included.
        context_parallel_size: 1; anything else is refused (NotImplementedError).
    """

    device: str
    num_heads: int
    head_dim: int
    page_size: int
    swa_page_size: int
    num_pages: int
    num_swa_pages: int
    req_to_token: Tensor
    full_to_swa_index_mapping: Tensor
    index_topk: int
    softmax_scale: float
    prefill_path: str = "auto"
    speculative_eagle_topk: int = 0
    speculative_num_draft_tokens: int = 0
    context_parallel_size: int = 1


@dataclass
class ForwardBatch:
    """One batch as the scheduler hands it to a backend; also the static buffers of a captured graph.

    In a graph, the harness copies each batch into the tensors of one static ``ForwardBatch`` whose addresses never
    change. Pad rows have ``seq_lens`` 1, ``req_pool_indices`` 0, ``positions`` 0 and ``out_cache_loc`` 0.

    Attributes:
        forward_mode: see ``ForwardMode``.
        req_pool_indices: int64 ``[bs]``, rows of ``req_to_token``.
        seq_lens: int64 ``[bs]``. DECODE: tokens including the new one. EXTEND and DRAFT_EXTEND: prefix + extend.
            TARGET_VERIFY: the committed prefix, drafts not counted.
        out_cache_loc: int64 ``[T]``, full location that each row writes; 0 for a pad row. For a multi-step draft
            ``[bs * num_steps]``, request-major: location of (request, step) at ``request * num_steps + step``.
        positions: int64 ``[T]``, absolute position of each row.
        seq_lens_cpu: the same on the host, or None for GPU-only lengths (then no host copy and no sync may happen).
        extend_seq_lens: int64 ``[bs]`` (EXTEND, DRAFT_EXTEND), else None.
        extend_seq_lens_cpu: the same on the host, or None.
        draft_token_num: TARGET_VERIFY: rows a request when uniform.
        verify_lens: int64 ``[bs]``, TARGET_VERIFY with a different number of rows a request, else None.
        actual_forward_mode: what the scheduler really runs when a captured graph of another mode is replayed:
            IDLE when this rank has no request. None means ``forward_mode``.
    """

    forward_mode: str
    req_pool_indices: Tensor
    seq_lens: Tensor
    out_cache_loc: Tensor
    positions: Tensor
    seq_lens_cpu: Sequence[int] | None = None
    extend_seq_lens: Tensor | None = None
    extend_seq_lens_cpu: Sequence[int] | None = None
    draft_token_num: int | None = None
    verify_lens: Tensor | None = None
    actual_forward_mode: str | None = None

    @property
    def batch_size(self) -> int:
        return self.seq_lens.shape[0]


@runtime_checkable
class AttentionBackend(Protocol):
    """A system under test: DeepSeek-V4 sparse attention over packed pages.

    One step, all of it inside the graph when captured, is always this sequence:

    1. metadata for the batch (``init_forward_metadata``; captured: ``init_forward_metadata_in_graph``),
    2. ``store_kv``: this step's K at ``swa_out_cache_loc``,
    3. ``store_compressed``: the entries that this step emits (ratio 4 and 128),
    4. ``write_c4_selection``: the indexer's choice (ratio 4),
    5. ``forward``.

    What cannot be served is refused by raising, before anything is written, and the backend stays usable. Rows to pack
    and selections of another dtype, width or count, a missing sink, and lengths that disagree or exceed
    ``max_context_len`` are AssertionErrors; an unknown ratio is a ValueError, a forward mode without metadata or
    without a graph bucket a NotImplementedError. ``refusals`` in matrix.yaml has each with its probe.
    """

    def kv_buffers(self) -> Mapping[str, Tensor]:
        """Raw uint8 tensors that hold all cache bytes, by pool name. The harness poisons and hashes them."""
        ...

    def set_key_buffer(self, loc: Tensor, k: Tensor) -> None:
        """Store history: ``k`` bf16 ``[N, 512]`` at full locations ``loc`` int64 ``[N]``; skips locations <= 0."""
        ...

    def set_extra_key_buffer(self, compress_ratio: int, loc: Tensor, entries: Tensor) -> None:
        """Store compressed history: ``entries`` bf16 ``[N, 512]``, each at the full location of its last token."""
        ...

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Eager metadata for ``batch``: build, then the in-graph step."""
        ...

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured graphs of up to ``max_bs`` requests and ``max_num_tokens`` rows read."""
        ...

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, *, in_capture: bool = False) -> None:
        """Before a capture (``in_capture``) or a replay: everything that happens outside the graph.

        Raises NotImplementedError for forward modes without a graph bucket (only decode or idle, verify, draft extend
        have one).
        """
        ...

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """The recorded part: upgrade the metadata in place from the static buffers. No host sync."""
        ...

    def on_after_cuda_graph_warmup(self) -> None:
        """Called between the warm-up run and the capture."""
        ...

    def store_kv(self, batch: ForwardBatch, k: Tensor) -> None:
        """Pack ``k`` bf16 ``[T, 512]`` into the SWA pool at ``swa_out_cache_loc``; pad rows write nothing."""
        ...

    def store_compressed(self, batch: ForwardBatch, compress_ratio: int, entries: Tensor) -> None:
        """Pack ``entries`` bf16 ``[T, 512]`` at ``c4_out_loc`` or ``c128_out_loc``; other rows write nothing."""
        ...

    def write_c4_selection(self, raw: Tensor) -> None:
        """Indexer output, int32 ``[T, index_topk]`` request-local entry ids, -1 padded, into the C4 page indices."""
        ...

    def forward(self, q: Tensor, batch: ForwardBatch, compress_ratio: int, attn_sink: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of ``q`` bf16 ``[T, H, 512]`` with ``attn_sink`` fp32 ``[H]``.

        Returns ``(out, lse)``: bf16 ``[T, H, 512]`` and fp32 ``[T, H]``, natural log over the keys without the sink,
        +inf (and an output of exact zeros) for a row without keys.
        """
        ...


@runtime_checkable
class MultiStepDraftBackend(Protocol):
    """One attention backend a draft step, over shared pools; N steps are N - 1 attention forwards.

    Step s is a decode at position prefix + s. ``batch`` carries the committed ``seq_lens`` (prefix) and the flat
    ``out_cache_loc`` ``[bs * num_steps]``; the multi-step backend slices and advances, nobody else.
    """

    @property
    def attn_backends(self) -> Sequence[AttentionBackend]:
        """The N - 1 backends, in step order."""
        ...

    def step_batch(self, batch: ForwardBatch, step: int) -> ForwardBatch:
        """The DECODE batch of step ``step``: ``seq_lens`` advanced, ``out_cache_loc`` and ``positions`` its own."""
        ...

    def init_forward_metadata(self, batch: ForwardBatch) -> None: ...

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None: ...

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, *, in_capture: bool = False) -> None: ...

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None: ...

    def on_after_cuda_graph_warmup(self) -> None: ...


@runtime_checkable
class GivesAccumulators(Protocol):
    """Optional, on a backend: the fp32 values behind a forward, which the gate then compares as well.

    Output in bf16 hides most of what another order of a sum changes; log-sum-exps show the weights but not the values.
    """

    def forward_with_accumulators(
        self, q: Tensor, batch: ForwardBatch, compress_ratio: int, attn_sink: Tensor
    ) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
        """``forward``, and for each row a tensor of whatever it kept, or None. Called eagerly only.

        Whether a row has one, its shape and its bits must follow from the row alone, not from its batch.
        """
        ...


class BackendFactory(Protocol):
    """What an entry point of group ``dsv4_matrix.backends`` or ``module:attr`` names: usually the backend class."""

    def __call__(self, runner: RunnerConfig) -> AttentionBackend: ...

    def multi_step(self, runner: RunnerConfig, *, num_steps: int, compress_ratio: int = 0) -> MultiStepDraftBackend:
        """The EAGLE draft runner's backends. ValueError for ratio 4 or 128: the draft layer is SWA-only."""
        ...


@runtime_checkable
class TellsKernels(Protocol):
    """Optional, on the factory: which of several kernels serves which call.

    Reports then hold it in their header, so that those made with another choice do not merge. ``kernels.json`` in the
    backend's import package may declare the same for all devices, for ``dsv4-matrix explain``; docs/backends.md.
    """

    def kernel_paths(self, device: str) -> Sequence[Mapping[str, str]]:
        """What serves on ``device``, a torch device string: mappings of ``call``, ``kernel`` and ``why``.

        Each call once, names without comma, colon or semicolon, ``why`` a sentence. It depends on the device, on
        versions and on settings of the process alone, and launches nothing.
        """
        ...


class Reference(Protocol):
    """An oracle, independent of every packed byte, slot and page table. All tensors may be on any device.

    A *bank* is ``[M, 512]``: logical keys, one row each. An *index* is int64 ``[T, N]`` into it, -1 where absent.
    """

    def visible(
        self,
        ratio: int,
        positions: Tensor,
        selection: Tensor | None = None,
        *,
        window: int = 128,
        early: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Logical keys that rows at ``positions`` int64 ``[T]`` attend: ``(window positions, compressed entries)``.

        Both int64, ``[T, W]`` and ``[T, E]``, -1 where absent (E may be 0). ``selection`` int ``[T, topk]`` is the C4
        indexer's choice, required for ratio 4. ``early`` adds that many entries beyond what is complete: a defect,
        which the judge uses to prove that a case would notice it.
        """
        ...

    def quantise_dequantise(self, k: Tensor) -> Tensor:
        """bf16 ``[N, 512]`` through the FP8 + UE8M0 format and back: fp64 ``[N, 512]``, the values a kernel reads."""
        ...

    def attend(
        self, q: Tensor, bank: Tensor, index: Tensor, sink: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Softmax attention in fp64: ``(out [T, H, 512], lse [T, H])``."""
        ...

    def attend_low_precision(
        self, q: Tensor, bank: Tensor, index: Tensor, sink: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The same in the precision of a good kernel: bf16 operands and probabilities, fp32 sums, another order."""
        ...
