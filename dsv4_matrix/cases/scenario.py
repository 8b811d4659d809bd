"""A case as values: the logical batch of each step, what it holds, and where the bytes lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4_matrix.protocol import ForwardBatch, RunnerConfig


@dataclass(frozen=True)
class Step:
    """One forward, logically: what the reference and the judge may know. No slot, page or packed byte in here.

    ``T`` rows are all real (pad rows are added by the mode that pads). All tensors on the case's device.

    Attributes:
        ratio: compress ratio of the layer, 0, 4 or 128.
        request: int64 ``[T]``, index of each row's request in this step (0 .. bs - 1).
        positions: int64 ``[T]``, absolute position of each row.
        prefix_lens: committed tokens of each request before this step.
        row_counts: rows of each request in this step, in order; sums to T.
        tokens: bf16 ``[sum L_r, 512]``, unquantised K of every position of every request, request after request,
            as of this step, the step's own rows included; each request has one decoy position after its last.
        token_base: int64 ``[bs + 1]``, offset of each request in ``tokens``.
        entries: bf16 ``[sum E_r, 512]``, compressed entries likewise, one decoy entry after each request's last;
            zero rows for ratio 0.
        entry_base: int64 ``[bs + 1]``.
        selection: int32 ``[T, index_topk]``, request-local entry ids that the indexer chose, -1 padded; ratio 4 only.
        q: bf16 ``[T, H, 512]``.
        sink: fp32 ``[H]``.
        k: bf16 ``[T, 512]``, this step's K rows, as handed to ``store_kv``.
        compressed: bf16 ``[T, 512]``, the entry that each row emits; rows that emit none hold NaN. None for ratio 0.
        softmax_scale: 512 ** -0.5.
    """

    ratio: int
    request: Tensor
    positions: Tensor
    prefix_lens: tuple[int, ...]
    row_counts: tuple[int, ...]
    tokens: Tensor
    token_base: Tensor
    entries: Tensor
    entry_base: Tensor
    selection: Tensor | None
    q: Tensor
    sink: Tensor
    k: Tensor
    compressed: Tensor | None
    softmax_scale: float


@dataclass(frozen=True)
class Placement:
    """Where one step's requests live: the physical half, which the reference never sees."""

    batch: ForwardBatch
    #: full location of every history token to write before the step, int64 ``[N]``, and its K bf16 ``[N, 512]``
    history_loc: Tensor
    history_k: Tensor
    #: full location of the last token of every complete history entry, and the entry (ratio 4 and 128), else None
    entry_loc: Tensor | None
    entry_k: Tensor | None
    #: the scheduler's tables during the step; copied in place into the runner's before it
    req_to_token: Tensor
    mapping: Tensor


@dataclass(frozen=True)
class Scenario:
    """A whole case: the runner that the backend is built for, and its steps in order."""

    case_id: str
    seed: int
    runner: RunnerConfig
    steps: tuple[Step, ...]
    placements: tuple[Placement, ...]
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Observation:
    """What a backend answered for one step on one leg (``dense``, ``sparse``, ``replay 2`` ...): live rows only.

    Attributes:
        leg: names the way the step was driven.
        step: index into ``Scenario.steps``.
        out: bf16 ``[T, H, 512]``.
        lse: fp32 ``[T, H]``.
        graph: True where the contract tolerance of graph replays applies.
    """

    leg: str
    step: int
    out: Tensor
    lse: Tensor
    graph: bool = False
