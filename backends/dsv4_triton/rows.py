"""How a batch of requests expands into query rows: one value that every metadata kernel reads.

Row ``t`` of request ``r`` with local index ``i`` sits at ``seq_lens[r] - rows(r) + i`` where ``seq_lens`` counts the
step's own tokens (decode, extend, draft extend), and at ``seq_lens[r] + i`` under verify, where it does not.
Nothing here reads a device value: GPU-only lengths never cause a synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dsv4_triton.refusals import refuse
from dsv4_triton.runner import DECODE, DRAFT_EXTEND, EXTEND, IDLE, TARGET_VERIFY, is_idle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from dsv4_triton.runner import ForwardBatch

#: Fill value of the lengths of pad requests: a request of one token at position 0.
PAD_SEQ_LEN = 1


@dataclass(frozen=True)
class RowLayout:
    """The expansion of ``bs`` requests into ``rows`` query rows.

    Attributes:
        seq_lens: int ``[bs]``.
        req_pool_indices: int ``[bs]``, rows of ``req_to_token``.
        out_cache_loc: int ``[<= rows]``, any stride; rows beyond its end write to the dummy location 0.
        lens: int ``[bs]``, rows of each request, or None where every request has ``rows_per_request``.
        counted: whether ``seq_lens`` includes the step's own tokens.
        rows: T; rows beyond the last request's are pad rows at position 0 of the last request.
        max_seq_len: upper bound of visible tokens, known on the host; sizes the page table.
        compress: whether C4 and C128 fields are wanted (not for draft extend: the draft layer is SWA-only).
        prefill: whether raw C4 selections are kept for the sparse-prefill path.
    """

    seq_lens: Tensor
    req_pool_indices: Tensor
    out_cache_loc: Tensor
    lens: Tensor | None
    rows_per_request: int
    counted: bool
    rows: int
    max_seq_len: int
    compress: bool = True
    prefill: bool = False

    @property
    def batch_size(self) -> int:
        return self.seq_lens.shape[0]


def eager_layout(batch: ForwardBatch, max_context_len: int, num_draft_tokens: int) -> RowLayout:
    """The rows of a batch that is run as it is.

    ``num_draft_tokens`` is used by a uniform verify batch that does not state its own. AssertionError if lengths of
    the batch's tensors disagree, or a known length exceeds ``max_context_len``.
    """
    bs, rows = batch.seq_lens.shape[0], batch.out_cache_loc.shape[0]
    mode = batch.forward_mode
    _check_requests(batch, bs)
    if is_idle(batch):
        return idle_layout(batch, bs)
    lens: Tensor | None = None
    per_request = 1
    if mode == DECODE:
        if rows != bs:
            _refuse_lengths(f"decode has {bs} requests and {rows} locations", "one location a request")
    elif mode == TARGET_VERIFY:
        lens = batch.verify_lens
        if lens is None:
            per_request = verify_width(batch, num_draft_tokens)
    else:
        lens = batch.extend_seq_lens
        if lens is None and mode == DRAFT_EXTEND and bs and rows % bs == 0:
            per_request = rows // bs
        elif lens is None and bs:
            _refuse_lengths(f"{mode!s} without extend_seq_lens", "extend_seq_lens int64 [bs]")
    if lens is not None and lens.shape[0] != bs:
        _refuse_lengths(f"{bs} requests and {lens.shape[0]} row counts", "one row count a request")
    if lens is None and rows < bs * per_request:
        _refuse_lengths(f"{bs} requests of {per_request} rows and {rows} locations", "one location a row")
    longest = known_max(batch.seq_lens_cpu)
    if longest is not None and mode == TARGET_VERIFY:
        longest += per_request if lens is None else rows
    max_seq_len = max_context_len if longest is None else longest
    if mode == TARGET_VERIFY:
        max_seq_len = min(max_seq_len, max_context_len)
    check_capacity(known_max(batch.seq_lens_cpu), max_context_len, "init_forward_metadata")
    return RowLayout(
        seq_lens=batch.seq_lens,
        req_pool_indices=batch.req_pool_indices,
        out_cache_loc=batch.out_cache_loc,
        lens=lens,
        rows_per_request=per_request,
        counted=mode != TARGET_VERIFY,
        rows=rows,
        max_seq_len=max(max_seq_len, 1),
        compress=mode != DRAFT_EXTEND,
        prefill=mode == EXTEND,
    )


def idle_layout(batch: ForwardBatch, bs: int) -> RowLayout:
    """The rows of a rank without a request: one token each of request row 0, written nowhere.

    Whatever the batch's tensors hold is not read: they may be left from the last batch.
    """
    device = batch.seq_lens.device
    return RowLayout(
        seq_lens=torch.full((bs,), PAD_SEQ_LEN, dtype=torch.int64, device=device),
        req_pool_indices=torch.zeros(bs, dtype=torch.int64, device=device),
        out_cache_loc=torch.zeros(bs, dtype=torch.int64, device=device),
        lens=None,
        rows_per_request=1,
        counted=True,
        rows=bs,
        max_seq_len=PAD_SEQ_LEN,
    )


def verify_width(batch: ForwardBatch, num_draft_tokens: int) -> int:
    """Rows a request of a uniform verify batch: its own statement, else the runner's."""
    width = batch.draft_token_num or num_draft_tokens
    if width < 1:
        _refuse_lengths("target_verify without draft_token_num or verify_lens", "either of them")
    return width


def known_max(lengths: Sequence[int] | None) -> int | None:
    """The longest of host-side lengths, None if there are none on the host."""
    return None if lengths is None else max((int(length) for length in lengths), default=PAD_SEQ_LEN)


def check_capacity(longest: int | None, capacity: int, where: str) -> None:
    """AssertionError if a known length is beyond what ``req_to_token`` can hold."""
    if longest is not None and longest > capacity:
        refuse(AssertionError, f"a sequence of {longest} tokens", f"up to {capacity}, the width of req_to_token", where)


def _check_requests(batch: ForwardBatch, bs: int) -> None:
    if batch.req_pool_indices.shape[0] != bs:
        _refuse_lengths(f"{bs} seq_lens and {batch.req_pool_indices.shape[0]} req_pool_indices", "as many of each")
    if batch.forward_mode not in (DECODE, EXTEND, TARGET_VERIFY, DRAFT_EXTEND, IDLE):
        raise NotImplementedError(f"RowLayout: unsupported forward_mode={batch.forward_mode!s}")


def _refuse_lengths(found: str, supported: str) -> None:
    refuse(AssertionError, found, supported, "init_forward_metadata")
