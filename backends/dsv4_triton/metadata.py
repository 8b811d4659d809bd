"""What attention reads besides q and the pools: one value a forward, with the field names of SGLang's backend.

``T`` query rows; "casual" in field names means causal, as upstream spells it. All tensors are int32 unless noted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from dsv4_triton.copy_rules import CopyRules
from dsv4_triton.geometry import PAGE_SIZE, WINDOW
from dsv4_triton.refusals import refuse, refuse_compressed_draft

if TYPE_CHECKING:
    from torch import Tensor

#: Widths of index tensors are multiples of this (FlashMLA reads whole blocks of 64 keys).
INDEX_PAD = 64


def padded(width: int, multiple: int = INDEX_PAD) -> int:
    """``width`` rounded up to a multiple."""
    return -(-width // multiple) * multiple


class Scheduler:
    """FlashMLA's tile-scheduler object: empty until a kernel that needs one fills it, and kept by captured graphs."""

    def __init__(self) -> None:
        self.tile_scheduler_metadata: Tensor | None = None
        self.num_splits: Tensor | None = None


@dataclass
class DSV4AttnMetadata:
    """Rows, windows and compressed entries of one forward.

    Attributes:
        page_size: 256.
        page_table: ``[T, ceil(max_seq_len / 256)]``, full page of each 256-token block of the row's request; 0, the
            dummy page, beyond the request's own tokens.
        raw_out_loc: int64 ``[T]``, full location that each row writes, 0 for pad rows.
        cuda_int32_kwargs: device and dtype of the int32 tensors.
        seq_lens_casual: ``[T]``, p + 1. Zero or negative for draft-extend pad rows that lie before position 0.
        positions_casual: ``[T]``, p.
        swa_page_indices: ``[T, 128]``, SWA slot of position p - k in column k, newest first; -1 where p - k < 0.
        swa_topk_lengths: ``[T]``, min(p + 1, 128).
        index_topk: width of the C4 selection, 512 or 1024.
        swa_out_cache_loc: ``[T]``, SWA slot that each row writes, 0 for pad rows.
        c4_out_loc: ``[T]``, raw_out_loc // 4 where a real row completes a group of 4, else -1.
        c128_out_loc: ``[T]``, likewise with 128.
        c4_topk_lengths_raw: ``[T]``, (p + 1) // 4.
        c4_topk_lengths_clamp1: ``[T]``, the same, at least 1.
        c4_sparse_topk_lengths: ``[T]``, min(clamp1, index_topk).
        c4_sparse_page_indices: ``[T, index_topk]``, C4 slots; -1 until ``write_c4_selection``.
        c4_sparse_raw_indices: the same selection as request-local entry ids, for EXTEND only.
        c128_topk_lengths_clamp1: ``[T]``, max((p + 1) // 128, 1).
        c128_page_indices: ``[T, 2 * pages padded to 64]``, C128 slots in order, -1 beyond (p + 1) // 128.
        c0_flashmla_metadata, c4_flashmla_metadata, c128_flashmla_metadata: scheduler object of each ratio.
    """

    page_size: int
    page_table: Tensor
    raw_out_loc: Tensor
    cuda_int32_kwargs: dict[str, Any]
    seq_lens_casual: Tensor
    positions_casual: Tensor
    swa_page_indices: Tensor
    swa_topk_lengths: Tensor
    index_topk: int
    swa_out_cache_loc: Tensor | None = None
    c4_out_loc: Tensor | None = None
    c128_out_loc: Tensor | None = None
    c4_topk_lengths_raw: Tensor | None = None
    c4_topk_lengths_clamp1: Tensor | None = None
    c4_sparse_topk_lengths: Tensor | None = None
    c4_sparse_page_indices: Tensor | None = None
    c4_sparse_raw_indices: Tensor | None = None
    c128_topk_lengths_clamp1: Tensor | None = None
    c128_page_indices: Tensor | None = None
    c0_flashmla_metadata: Any = None
    c4_flashmla_metadata: Any = None
    c128_flashmla_metadata: Any = None

    EQUAL: ClassVar[tuple[str, ...]] = ("index_topk", "page_size", "cuda_int32_kwargs")
    SCHEDULERS: ClassVar[tuple[str, ...]] = ("c0_flashmla_metadata", "c4_flashmla_metadata", "c128_flashmla_metadata")
    COPY_RULES: ClassVar[CopyRules] = CopyRules(
        equal=EQUAL,
        copy=(
            "page_table",
            "raw_out_loc",
            "seq_lens_casual",
            "positions_casual",
            "swa_page_indices",
            "swa_topk_lengths",
            "c4_out_loc",
            "c128_out_loc",
            "c4_topk_lengths_raw",
            "c4_topk_lengths_clamp1",
            "c4_sparse_topk_lengths",
            "c4_sparse_page_indices",
            "c4_sparse_raw_indices",
            "c128_topk_lengths_clamp1",
            "c128_page_indices",
        ),
        assign=("swa_out_cache_loc", *SCHEDULERS),
    )
    #: A breakable graph runs attention outside the captured pieces: what those pieces read is copied, what only
    #: attention reads is replaced, and what the indexer and the in-graph step rewrite is left alone.
    BREAKABLE_RULES: ClassVar[CopyRules] = CopyRules(
        equal=EQUAL,
        copy=(
            "raw_out_loc",
            "seq_lens_casual",
            "positions_casual",
            "c4_out_loc",
            "c128_out_loc",
            "c4_topk_lengths_raw",
            "c4_topk_lengths_clamp1",
            "c4_sparse_topk_lengths",
        ),
        assign=(
            "page_table",
            "swa_page_indices",
            "swa_topk_lengths",
            "c128_page_indices",
            "c128_topk_lengths_clamp1",
            *SCHEDULERS,
        ),
        keep=("c4_sparse_page_indices", "c4_sparse_raw_indices", "swa_out_cache_loc"),
    )

    @property
    def c4_sparse_topk(self) -> int:
        """Earlier name of ``index_topk``."""
        return self.index_topk

    @property
    def rows(self) -> int:
        return self.seq_lens_casual.shape[0]

    def get_flashmla_metadata(self, compress_ratio: int) -> Any:
        """The scheduler object of a ratio; ValueError for a ratio other than 0, 4 and 128."""
        if compress_ratio not in (0, 4, 128):
            refuse(ValueError, f"invalid compress_ratio={compress_ratio}", "0, 4 and 128", "get_flashmla_metadata")
        return getattr(self, f"c{compress_ratio}_flashmla_metadata")

    def compressed_lists(self, compress_ratio: int, where: str) -> tuple[Tensor, Tensor]:
        """Slots and lengths of entries of ratio 4 or 128; ValueError without them: the draft layer is SWA-only."""
        indices, lengths = self.c128_page_indices, self.c128_topk_lengths_clamp1
        if compress_ratio == 4:
            indices, lengths = self.c4_sparse_page_indices, self.c4_sparse_topk_lengths
        if indices is None or lengths is None:
            refuse_compressed_draft(compress_ratio, where)
        return indices, lengths

    def compressed_out_loc(self, compress_ratio: int, where: str) -> Tensor:
        """Slot that each row writes in the pool of ratio 4 or 128, -1 for none; ValueError likewise."""
        slots = self.c4_out_loc if compress_ratio == 4 else self.c128_out_loc
        if slots is None:
            refuse_compressed_draft(compress_ratio, where)
        return slots

    def reset_flashmla_metadata(self) -> None:
        """Fresh scheduler objects, for the ratios that have one."""
        for name in self.SCHEDULERS:
            if getattr(self, name) is not None:
                setattr(self, name, Scheduler())

    def copy_(self, other: DSV4AttnMetadata) -> None:
        """Take over ``other``'s values, storage kept: see ``CopyRules.apply``."""
        self.COPY_RULES.apply(self, other)

    def refresh_for_breakable_cuda_graph_replay_(self, other: DSV4AttnMetadata) -> None:
        """Prepare captured metadata for the replay of a breakable graph from freshly built ``other``."""
        self.BREAKABLE_RULES.apply(self, other)


for _rules in (DSV4AttnMetadata.COPY_RULES, DSV4AttnMetadata.BREAKABLE_RULES):
    _rules.check_partition(DSV4AttnMetadata)


def allocate(
    rows: int, pages: int, index_topk: int, device: torch.device, *, compress: bool = True, prefill: bool = False
) -> DSV4AttnMetadata:
    """Metadata of ``rows`` rows for the metadata kernel to fill; no value is defined but -1 in the raw C4 selection.

    ``pages`` page-table columns; ``compress`` adds the C4 and C128 fields, ``prefill`` the raw C4 selection.
    """
    kwargs: dict[str, Any] = {"device": device, "dtype": torch.int32}

    def column() -> Tensor:
        return torch.empty(rows, **kwargs)

    core = DSV4AttnMetadata(
        page_size=PAGE_SIZE,
        page_table=torch.empty(rows, pages, **kwargs),
        raw_out_loc=torch.empty(rows, device=device, dtype=torch.int64),
        cuda_int32_kwargs=kwargs,
        seq_lens_casual=column(),
        positions_casual=column(),
        swa_page_indices=torch.empty(rows, padded(WINDOW), **kwargs),
        swa_topk_lengths=column(),
        index_topk=index_topk,
        swa_out_cache_loc=column(),
        c0_flashmla_metadata=Scheduler(),
    )
    if compress:
        core.c4_out_loc = column()
        core.c128_out_loc = column()
        core.c4_topk_lengths_raw = column()
        core.c4_topk_lengths_clamp1 = column()
        core.c4_sparse_topk_lengths = column()
        core.c4_sparse_page_indices = torch.empty(rows, padded(index_topk), **kwargs)
        core.c128_topk_lengths_clamp1 = column()
        core.c128_page_indices = torch.empty(rows, padded(2 * pages), **kwargs)
        core.c4_flashmla_metadata = Scheduler()
        core.c128_flashmla_metadata = Scheduler()
        if prefill:
            # nobody is obliged to write a selection, and what is left here would be read as one
            core.c4_sparse_raw_indices = torch.full_like(core.c4_sparse_page_indices, -1)
    return core
