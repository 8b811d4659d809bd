"""What the backend does not support, each as one sentence: who refuses, what was found, what is supported.

Every check raises (never ``assert``, so that ``python -O`` keeps it) and runs before anything is written to a pool.
Exception types are those that callers of this model's backends know: AssertionError for fixed geometry, missing inputs
and what may be packed, stored or indexed, ValueError for ratios, NotImplementedError for forward modes. Where they
know none (queries, sinks, batches), ValueError for shapes and devices and TypeError for dtypes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch

from dsv4_triton.geometry import COMPRESS_RATIOS, HEAD_DIM, NUM_HEADS, PAGE_SIZE, SWA_PAGE_SIZES
from dsv4_triton.runner import DECODE, DRAFT_EXTEND, EXTEND, IDLE, TARGET_VERIFY

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4_triton.runner import ForwardBatch, RunnerConfig

ACTOR = "DSV4TritonBackend"
INDEX_TOPKS = (512, 1024)
PREFILL_PATHS = ("auto", "dense", "sparse")
DRAFT_STEPS = range(2, 6)
EAGER_MODES = (EXTEND, DECODE, TARGET_VERIFY, DRAFT_EXTEND, IDLE)
GRAPH_BUCKETS = {
    DECODE: "decode_or_idle",
    IDLE: "decode_or_idle",
    TARGET_VERIFY: "target_verify",
    DRAFT_EXTEND: "draft_extend",
}
SWA_ONLY = "draft layer is SWA-only"


def refuse(error: type[Exception], found: str, supported: str, where: str = "") -> NoReturn:
    """Raise ``error`` with one sentence that names actor, place, what was found and what is supported."""
    place = f"{ACTOR}.{where}" if where else ACTOR
    raise error(f"{place}: {found}; supported: {supported}")


def check_runner(runner: RunnerConfig) -> None:
    """Refuse a runner whose geometry, speculation or parallelism this backend has no kernels for."""
    if runner.page_size != PAGE_SIZE:
        refuse(AssertionError, f"page_size is {runner.page_size}, the system hardcodes page_size={PAGE_SIZE}", "256")
    if runner.head_dim != HEAD_DIM:
        refuse(AssertionError, f"head_dim is {runner.head_dim}", "512 (448 nope + 64 rope)")
    if runner.swa_page_size not in SWA_PAGE_SIZES:
        refuse(AssertionError, f"swa_page_size is {runner.swa_page_size}", "256 or 128")
    if runner.num_heads not in NUM_HEADS:
        refuse(ValueError, f"num_heads is {runner.num_heads}", "16, 32, 64 or 128 heads")
    if runner.index_topk not in INDEX_TOPKS:
        refuse(AssertionError, f"index_topk is {runner.index_topk}", "512 or 1024")
    if runner.speculative_eagle_topk not in (0, 1):
        refuse(
            AssertionError,
            f"speculative_eagle_topk is {runner.speculative_eagle_topk}, a tree; MTP Topk > 1 not supported",
            "0 (off) or 1 (chain)",
        )
    if runner.context_parallel_size != 1:
        refuse(
            NotImplementedError,
            f"context_parallel_size is {runner.context_parallel_size}, context parallelism is not supported",
            "1",
        )
    if runner.prefill_path not in PREFILL_PATHS:
        refuse(ValueError, f"prefill_path is {runner.prefill_path!r}", "auto, dense or sparse")
    table, mapping = runner.req_to_token, runner.full_to_swa_index_mapping
    if table is None or table.dim() != 2 or table.dtype != torch.int32 or table.stride(1) != 1:
        refuse(AssertionError, f"req_to_token is {_describe(table)}", "int32 [max_requests, max_context_len]")
    if mapping is None or mapping.dim() != 1 or mapping.dtype != torch.int64 or not mapping.is_contiguous():
        refuse(AssertionError, f"full_to_swa_index_mapping is {_describe(mapping)}", "a contiguous int64 [locations]")
    if runner.num_pages < 1 or runner.num_swa_pages < 1:
        refuse(
            AssertionError,
            f"num_pages is {runner.num_pages}, num_swa_pages {runner.num_swa_pages}",
            "at least 1 each, the dummy page included",
        )


def check_draft_runner(runner: RunnerConfig, num_steps: int, compress_ratio: int) -> None:
    """Refuse a multi-step draft backend that the draft model cannot have: compressed, a tree, or without a chain."""
    if compress_ratio != 0:
        refuse(ValueError, f"compress_ratio {compress_ratio} for a draft runner: {SWA_ONLY}", "ratio 0", "multi_step")
    if num_steps not in DRAFT_STEPS:
        refuse(ValueError, f"num_steps is {num_steps}", "2 to 5 (N steps are N - 1 attention forwards)", "multi_step")
    check_runner(runner)


def check_eager_mode(batch: ForwardBatch) -> None:
    """NotImplementedError for a forward mode without metadata."""
    if batch.forward_mode not in EAGER_MODES:
        refuse(
            NotImplementedError,
            f"unsupported forward_mode={batch.forward_mode!s}",
            ", ".join(EAGER_MODES),
            "init_forward_metadata",
        )


def graph_bucket(batch: ForwardBatch) -> str:
    """The graph bucket of the batch's mode; NotImplementedError where there is none."""
    bucket = GRAPH_BUCKETS.get(batch.forward_mode)
    if bucket is None:
        refuse(
            NotImplementedError,
            f"unsupported forward_mode={batch.forward_mode!s}: it has no CUDA-graph bucket",
            "decode, idle, target_verify and draft_extend",
            "init_forward_metadata_out_graph",
        )
    return bucket


def check_ratio(ratio: int, where: str) -> None:
    """ValueError for a compress ratio that no pool exists for."""
    if ratio not in COMPRESS_RATIOS:
        refuse(ValueError, f"invalid compress_ratio={ratio}", "0, 4 and 128", where)


def check_compressed_ratio(ratio: int, where: str) -> None:
    """ValueError for an unknown ratio, AssertionError for ratio 0, which has no compressed pool."""
    check_ratio(ratio, where)
    if ratio == 0:
        refuse(AssertionError, "compress_ratio 0 has no compressed pool (its layers are SWA-only)", "4 and 128", where)


def refuse_compressed_draft(ratio: int, where: str) -> NoReturn:
    """The draft layer is one decoder layer of ratio 0: its metadata holds no compressed indices."""
    refuse(ValueError, f"compress_ratio {ratio} under draft_extend: {SWA_ONLY}", "ratio 0", where)


def refuse_ragged_attention(core: object, where: str) -> NoReturn:
    """Metadata of another kind describes rows that no kernel here reads."""
    refuse(NotImplementedError, f"ragged attention over {type(core).__name__}", "DSV4AttnMetadata", where)


def check_device(name: str, tensor: Tensor, device: torch.device, where: str) -> None:
    """ValueError for a tensor on another device than the runner's tables."""
    if tensor.device != device:
        refuse(ValueError, f"{name} is on {tensor.device}", f"{device}, where the runner's tables are", where)


def check_query(q: Tensor, num_heads: int) -> None:
    """Refuse a query that is not bf16 ``[T, num_heads, 512]`` with a contiguous last dimension."""
    want = f"bf16 [T, {num_heads}, {HEAD_DIM}] with a contiguous last dimension"
    if q.dtype != torch.bfloat16:
        refuse(TypeError, f"q is {_describe(q)}", want, "forward")
    if q.dim() != 3 or q.shape[1] != num_heads or q.shape[2] != HEAD_DIM or (q.numel() and q.stride(2) != 1):
        refuse(ValueError, f"q is {_describe(q)}", want, "forward")


def check_sink(sink: Tensor | None, num_heads: int) -> Tensor:
    """The sink. A missing one is refused (AssertionError), and a dtype that would be reinterpreted, another shape."""
    want = f"float32 [{num_heads}]; a sink of -1e30 is a no-op"
    if sink is None:
        refuse(AssertionError, "attn_sink is missing (None)", want, "forward")
    if sink.dtype != torch.float32:
        refuse(TypeError, f"attn_sink is {_describe(sink)}", want, "forward")
    if tuple(sink.shape) != (num_heads,):
        refuse(ValueError, f"attn_sink is {_describe(sink)}", want, "forward")
    return sink


def check_rows(rows: Tensor, slots: int, where: str) -> None:
    """AssertionError for rows to store that are not bf16 ``[slots, 512]``."""
    strided = rows.dim() != 2 or (rows.numel() and rows.stride(1) != 1)
    if rows.dtype != torch.bfloat16 or rows.shape != (slots, HEAD_DIM) or strided:
        want = f"bf16 [{slots}, {HEAD_DIM}] with a contiguous last dimension"
        refuse(AssertionError, f"the rows to store are {_describe(rows)}", want, where)


def check_locations(loc: Tensor, where: str) -> None:
    """AssertionError for locations to store at that are not one-dimensional int64 or int32."""
    check_integers("loc", loc, where, AssertionError)


def check_integers(name: str, values: Tensor, where: str, error: type[Exception] = TypeError) -> None:
    """Refuse lengths, indices or locations that are not one-dimensional int64 or int32."""
    if values.dim() != 1 or values.dtype not in (torch.int64, torch.int32):
        refuse(error, f"{name} is {_describe(values)}", "int64 or int32 [N]", where)


def check_selection(raw: Tensor, index_topk: int) -> None:
    """AssertionError for a C4 selection that is not int32 ``[T, index_topk]``."""
    narrow = raw.dim() != 2 or raw.shape[1] != index_topk
    if raw.dtype != torch.int32 or narrow or (raw.numel() and raw.stride(1) != 1):
        want = f"int32 [T, {index_topk}] with a contiguous last dimension"
        refuse(AssertionError, f"the selection is {_describe(raw)}", want, "write_c4_selection")


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return repr(value)
