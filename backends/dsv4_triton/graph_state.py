"""What captured graphs read: static inputs per (mode, size), static metadata shared by all of them.

A captured step reads its inputs (raw metadata) from tensors of its own, fills the metadata inside the graph and
attends. So preparing a replay is a handful of value copies into the raw tensors, and nothing that an earlier replay
left behind can be seen: every metadata field is rewritten by the graph itself. Metadata tensors are allocated once,
for the largest graph; smaller graphs use their first rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from dsv4_triton.forward_metadata import DSV4Metadata, DSV4RawDecodeMetadata, DSV4RawVerifyMetadata, RawMetadata
from dsv4_triton.metadata import DSV4AttnMetadata, allocate
from dsv4_triton.metadata_kernels import page_columns
from dsv4_triton.refusals import graph_bucket, refuse
from dsv4_triton.rows import PAD_SEQ_LEN, RowLayout, check_capacity, known_max, verify_width
from dsv4_triton.runner import DRAFT_EXTEND, TARGET_VERIFY, is_idle

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4_triton.runner import ForwardBatch, RunnerConfig

WHERE = "init_forward_metadata_out_graph"


@dataclass(frozen=True)
class GraphKey:
    """Which captured graph: requests, and rows where they do not follow from the requests (ragged verify)."""

    bucket: str
    batch_size: int
    rows: int
    ragged: bool = False

    def holds(self, other: GraphKey) -> bool:
        """Whether a batch of ``other`` can be padded into this graph."""
        return (
            self.bucket == other.bucket
            and self.ragged == other.ragged
            and self.batch_size >= other.batch_size
            and self.rows >= other.rows
            and (self.ragged or self.rows * other.batch_size == other.rows * self.batch_size)
        )


@dataclass(frozen=True)
class CapturedStep:
    """The tensors of one captured graph: its inputs, and the metadata that it fills."""

    key: GraphKey
    raw: RawMetadata
    layout: RowLayout
    metadata: DSV4Metadata


class GraphState:
    """Captured steps ``[bucket][key]`` for graphs of up to ``max_bs`` requests and ``max_num_tokens`` rows."""

    def __init__(self, runner: RunnerConfig, max_bs: int, max_num_tokens: int) -> None:
        if max_bs < 0 or max_num_tokens < 0:
            refuse(
                AssertionError,
                f"max_bs {max_bs}, max_num_tokens {max_num_tokens}",
                "0 or more",
                "init_cuda_graph_state",
            )
        self.max_bs = max_bs
        self.max_rows = max(max_num_tokens, max_bs)
        #: draft-extend rows a request; uniform, since the graph's row count is
        self.draft_extend_rows = max(max_num_tokens // max_bs, 1) if max_bs else 1
        self.num_draft_tokens = runner.speculative_num_draft_tokens
        self.device = runner.req_to_token.device
        self.max_context_len = runner.req_to_token.shape[1]
        self.steps: dict[str, dict[GraphKey, CapturedStep]] = {}
        self._metadata = allocate(
            self.max_rows, page_columns(self.max_context_len), runner.index_topk, self.device, compress=True
        )

    def capture(self, batch: ForwardBatch) -> CapturedStep:
        """The step to capture for a batch of this size, its inputs those of pad requests that write nowhere."""
        key = self._key(batch)
        self._check_fits(key, batch)
        bucket = self.steps.setdefault(key.bucket, {})
        if key not in bucket:
            bucket[key] = self._allocate_step(key)
        step = bucket[key]
        step.raw.copy_(self._pad_inputs(key))
        return step

    def prepare_replay(self, batch: ForwardBatch) -> CapturedStep:
        """Copy a batch into the inputs of its captured step, padded to that step's size.

        The smallest captured step that holds the batch is taken; AssertionError if there is none.
        """
        key = self._key(batch)
        self._check_fits(key, batch)
        fitting = [step for step in self.steps.get(key.bucket, {}).values() if step.key.holds(key)]
        if not fitting:
            sizes = ", ".join(f"{k.batch_size} x {k.rows}" for k in self.steps.get(key.bucket, {})) or "none"
            refuse(
                AssertionError,
                f"a {key.bucket} replay of {key.batch_size} requests and {key.rows} rows",
                f"captured (requests x rows): {sizes}",
                WHERE,
            )
        step = min(fitting, key=lambda s: (s.key.batch_size, s.key.rows))
        if is_idle(batch):
            # an idle rank may replay any size, and its batch may have no request to tell which
            for captured in fitting:
                captured.raw.copy_(self._pad_inputs(captured.key))
            return step
        raw = step.raw
        _fill(raw.req_pool_indices, batch.req_pool_indices, 0)
        _fill(raw.seq_lens, batch.seq_lens, PAD_SEQ_LEN)
        _fill(raw.out_cache_loc, batch.out_cache_loc, 0)
        if isinstance(raw, DSV4RawVerifyMetadata):
            raw.seq_lens_cpu = batch.seq_lens_cpu
            if raw.verify_lens is not None and batch.verify_lens is not None:
                _fill(raw.verify_lens, batch.verify_lens, 0)
        return step

    def _key(self, batch: ForwardBatch) -> GraphKey:
        bucket, bs = graph_bucket(batch), batch.seq_lens.shape[0]
        if batch.forward_mode == TARGET_VERIFY:
            if batch.verify_lens is not None:
                return GraphKey(bucket, bs, batch.out_cache_loc.shape[0], ragged=True)
            return GraphKey(bucket, bs, bs * verify_width(batch, self.num_draft_tokens))
        if batch.forward_mode == DRAFT_EXTEND:
            return GraphKey(bucket, bs, bs * self.draft_extend_rows)
        return GraphKey(bucket, bs, bs)

    def _check_fits(self, key: GraphKey, batch: ForwardBatch) -> None:
        if key.batch_size > self.max_bs or key.rows > self.max_rows:
            refuse(
                AssertionError,
                f"{key.batch_size} requests and {key.rows} rows, beyond the capture",
                f"up to {self.max_bs} requests and {self.max_rows} rows, as given to init_cuda_graph_state",
                WHERE,
            )
        if is_idle(batch):
            return
        if batch.out_cache_loc.shape[0] > key.rows:
            refuse(
                AssertionError,
                f"{batch.out_cache_loc.shape[0]} locations for {key.batch_size} requests",
                f"at most {key.rows}: {key.rows // max(key.batch_size, 1)} rows a request in this graph",
                WHERE,
            )
        longest = known_max(batch.seq_lens_cpu)
        check_capacity(longest, self.max_context_len, WHERE)
        if batch.forward_mode == DRAFT_EXTEND and batch.extend_seq_lens_cpu is not None:
            self._check_uniform(batch)

    def _check_uniform(self, batch: ForwardBatch) -> None:
        """A graph's draft-extend rows are uniform; true ragged lengths belong to the eager path."""
        extends = batch.extend_seq_lens_cpu or ()
        for extend, length in zip(extends, batch.seq_lens_cpu or [PAD_SEQ_LEN] * len(extends), strict=True):
            is_pad = extend in (0, PAD_SEQ_LEN) and length == PAD_SEQ_LEN
            if extend != self.draft_extend_rows and not is_pad:
                refuse(
                    AssertionError,
                    f"a draft-extend request of {extend} rows in a graph",
                    f"{self.draft_extend_rows} rows a request; run ragged lengths eagerly",
                    WHERE,
                )

    def _pad_inputs(self, key: GraphKey) -> RawMetadata:
        """Inputs of pad requests: one token each of request row 0, written to the dummy location 0."""

        def constant(length: int, value: int) -> Tensor:
            return torch.full((length,), value, dtype=torch.int64, device=self.device)

        bs = key.batch_size
        inputs = (constant(bs, 0), constant(bs, PAD_SEQ_LEN), constant(key.rows, 0))
        if key.bucket != TARGET_VERIFY:
            return DSV4RawDecodeMetadata(*inputs)
        return DSV4RawVerifyMetadata(
            *inputs, verify_lens=constant(bs, 0) if key.ragged else None, total_verify_tokens=key.rows
        )

    def _allocate_step(self, key: GraphKey) -> CapturedStep:
        raw = self._pad_inputs(key)
        compress = key.bucket != DRAFT_EXTEND
        core = _first_rows(self._metadata, key.rows, compress)
        layout = RowLayout(
            seq_lens=raw.seq_lens,
            req_pool_indices=raw.req_pool_indices,
            out_cache_loc=raw.out_cache_loc,
            lens=raw.verify_lens if isinstance(raw, DSV4RawVerifyMetadata) else None,
            rows_per_request=key.rows // max(key.batch_size, 1),
            counted=key.bucket != TARGET_VERIFY,
            rows=key.rows,
            max_seq_len=self.max_context_len,
            compress=compress,
        )
        return CapturedStep(key, raw, layout, DSV4Metadata.over(core, layout))


def _fill(into: Tensor, values: Tensor, pad: int) -> None:
    """``values`` at the front, ``pad`` behind: one launch where they fill it."""
    count = values.shape[0]
    into[:count].copy_(values)
    if count < into.shape[0]:
        into[count:].fill_(pad)


def _first_rows(core: DSV4AttnMetadata, rows: int, compress: bool) -> DSV4AttnMetadata:
    """Metadata over the first ``rows`` rows of ``core``'s tensors, with schedulers of its own."""
    wanted: dict[str, Any] = {
        field.name: value[:rows] if isinstance(value, torch.Tensor) else value
        for field in fields(core)
        if (value := getattr(core, field.name)) is not None
    }
    if not compress:
        wanted = {name: value for name, value in wanted.items() if not name.startswith(("c4_", "c128_"))}
    sliced = DSV4AttnMetadata(**wanted)
    sliced.reset_flashmla_metadata()
    return sliced
