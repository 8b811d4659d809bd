"""What belongs to one forward around the core metadata, and the static inputs that a captured step builds it from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dsv4_triton.copy_rules import CopyRules
from dsv4_triton.geometry import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from dsv4_triton.metadata import DSV4AttnMetadata
    from dsv4_triton.rows import RowLayout
    from dsv4_triton.sparse_prefill import SparsePrefillCache


class Copyable(Protocol):
    """A part of the metadata that is updated in place."""

    def copy_(self, other: Any, /) -> Any: ...


@dataclass
class PagedIndexerMetadata:
    """What the C4 indexer reads: page table and C4 lengths of each row; its pool has 64 entries a page."""

    page_size: int
    page_table: Tensor
    c4_seq_lens: Tensor

    COPY_RULES: ClassVar[CopyRules] = CopyRules(equal=("page_size",), copy=("page_table", "c4_seq_lens"))

    def __post_init__(self) -> None:
        if self.page_size != PAGE_SIZE:
            raise AssertionError(f"PagedIndexerMetadata: page_size is {self.page_size}; supported: {PAGE_SIZE}")

    def copy_(self, other: PagedIndexerMetadata) -> None:
        self.COPY_RULES.apply(self, other)


@dataclass
class DSV4Metadata:
    """The metadata of one forward: core, and what belongs to it.

    ``layout`` is the expansion that the core was built from. ``sparse_prefill_cache`` is built by the first layer of
    an EXTEND forward that takes the sparse path and shared by the others. ``prefill_shared_reads_snapshotted`` says
    that nothing shared with the scheduler is read after the replay starts. The compress plans belong to a compressor;
    None where there is none.
    """

    core_attn_metadata: DSV4AttnMetadata
    indexer_metadata: PagedIndexerMetadata | None = None
    c4_compress_metadata: Copyable | None = None
    c128_compress_metadata: Copyable | None = None
    sparse_prefill_cache: SparsePrefillCache | None = None
    prefill_shared_reads_snapshotted: bool = False
    layout: RowLayout | None = None

    PARTS: ClassVar[tuple[str, ...]] = ("indexer_metadata", "c4_compress_metadata", "c128_compress_metadata")

    @classmethod
    def over(cls, core: DSV4AttnMetadata, layout: RowLayout) -> DSV4Metadata:
        """Metadata of ``core``, whose C4 fields, where there are any, are also the indexer's."""
        indexer = None
        if core.c4_topk_lengths_raw is not None:
            indexer = PagedIndexerMetadata(core.page_size, core.page_table, core.c4_topk_lengths_raw)
        return cls(core, indexer, layout=layout)

    @property
    def core_metadata(self) -> DSV4AttnMetadata:
        """Another name of ``core_attn_metadata``."""
        return self.core_attn_metadata

    def copy_(self, other: DSV4Metadata) -> None:
        """Take over ``other``'s values in place; the chunk cache and its flag belong to one forward and are dropped."""
        self._check_parts(other)
        self.core_attn_metadata.copy_(other.core_attn_metadata)
        self._copy_parts(other)

    def refresh_for_breakable_cuda_graph_replay_(self, other: DSV4Metadata) -> None:
        """The same for a breakable graph: see ``DSV4AttnMetadata.refresh_for_breakable_cuda_graph_replay_``."""
        self._check_parts(other)
        self.core_attn_metadata.refresh_for_breakable_cuda_graph_replay_(other.core_attn_metadata)
        self._copy_parts(other)

    def _check_parts(self, other: DSV4Metadata) -> None:
        for name in self.PARTS:
            have, new = getattr(self, name), getattr(other, name)
            if type(have) is not type(new):
                raise AssertionError(
                    f"DSV4Metadata.copy_: {name} is a {type(have).__name__} here and a {type(new).__name__} there"
                )

    def _copy_parts(self, other: DSV4Metadata) -> None:
        for name in self.PARTS:
            if getattr(self, name) is not None:
                getattr(self, name).copy_(getattr(other, name))
        self.sparse_prefill_cache = None
        self.prefill_shared_reads_snapshotted = False
        self.layout = other.layout


@dataclass
class DSV4RawDecodeMetadata:
    """Static inputs of a captured decode or draft-extend step, from which the graph itself builds the metadata.

    int64 ``req_pool_indices [bs]``, ``seq_lens [bs]``, ``out_cache_loc [rows]``.
    """

    req_pool_indices: Tensor
    seq_lens: Tensor
    out_cache_loc: Tensor

    COPY_RULES: ClassVar[CopyRules] = CopyRules(copy=("req_pool_indices", "seq_lens", "out_cache_loc"))

    def copy_(self, other: RawMetadata) -> None:
        """As the rules say; AssertionError for another kind of raw metadata."""
        self.COPY_RULES.apply(self, other)


@dataclass
class DSV4RawVerifyMetadata:
    """The same for a verify step. ``verify_lens`` int64 ``[bs]`` is read inside the graph, so its value is copied
    (upstream assigns the reference, which is right only if the caller's own tensor is static)."""

    req_pool_indices: Tensor
    seq_lens: Tensor
    out_cache_loc: Tensor
    verify_lens: Tensor | None = None
    extend_seq_lens: Tensor | None = None
    extend_start_loc: Tensor | None = None
    seq_lens_cpu: Sequence[int] | None = None
    total_verify_tokens: int = 0
    c128_compress_metadata: Copyable | None = None

    COPY_RULES: ClassVar[CopyRules] = CopyRules(
        copy=("req_pool_indices", "seq_lens", "out_cache_loc", "verify_lens"),
        assign=("extend_seq_lens", "extend_start_loc", "seq_lens_cpu", "total_verify_tokens"),
        keep=("c128_compress_metadata",),
    )

    def copy_(self, other: RawMetadata) -> None:
        """As the rules say; the compress plan is refilled in place if both sides have one, else replaced."""
        self.COPY_RULES.apply(self, other)
        plan = other.c128_compress_metadata if isinstance(other, DSV4RawVerifyMetadata) else None
        if self.c128_compress_metadata is not None and plan is not None:
            self.c128_compress_metadata.copy_(plan)
        else:
            self.c128_compress_metadata = plan


RawMetadata = DSV4RawDecodeMetadata | DSV4RawVerifyMetadata

for _cls in (PagedIndexerMetadata, DSV4RawDecodeMetadata, DSV4RawVerifyMetadata):
    _cls.COPY_RULES.check_partition(_cls)
