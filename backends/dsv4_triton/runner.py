"""What the backend reads of a model runner and of a batch: Protocols, so that an engine's own classes fit.

Forward modes are plain strings; an enum whose members equal these strings (a ``StrEnum``) fits too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

EXTEND = "extend"
DECODE = "decode"
TARGET_VERIFY = "target_verify"
DRAFT_EXTEND = "draft_extend"
IDLE = "idle"


class RunnerConfig(Protocol):
    """The model runner's side. Tensors belong to the scheduler, which changes them in place between steps.

    ``req_to_token`` int32 ``[max_requests, max_context_len]`` holds the full location of (request row, position);
    ``full_to_swa_index_mapping`` int64 the SWA slot of a full location, 0 for the dummy location 0.
    ``prefill_path`` is ``auto`` (sparse above 11673 rows), ``dense`` or ``sparse``.
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
    prefill_path: str
    speculative_eagle_topk: int
    speculative_num_draft_tokens: int
    context_parallel_size: int


class ForwardBatch(Protocol):
    """One batch, or the static buffers of a captured graph. ``bs`` requests, ``T`` rows.

    ``seq_lens`` int ``[bs]`` counts the step's own tokens, except under TARGET_VERIFY, where it is the committed
    prefix. ``out_cache_loc`` int ``[T]`` is the full location that each row writes, 0 for a pad row.
    """

    forward_mode: str
    req_pool_indices: Tensor
    seq_lens: Tensor
    out_cache_loc: Tensor
    positions: Tensor
    seq_lens_cpu: Sequence[int] | None
    extend_seq_lens: Tensor | None
    extend_seq_lens_cpu: Sequence[int] | None
    draft_token_num: int | None
    verify_lens: Tensor | None
    actual_forward_mode: str | None


def is_idle(batch: ForwardBatch) -> bool:
    """Whether this rank has no request: an idle batch, or an idle replay of another mode's graph."""
    return IDLE in (batch.forward_mode, getattr(batch, "actual_forward_mode", None))
