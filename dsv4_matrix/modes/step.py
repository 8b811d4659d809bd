"""The step: the one sequence that every mode runs, eager or captured, as contracts and ``protocol`` fix it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from dsv4_matrix.cases.scenario import Placement, Step
from dsv4_matrix.protocol import AttentionBackend, ForwardBatch


@dataclass(frozen=True)
class StepInputs:
    """What one forward is given. In a graph these tensors are the static buffers.

    Attributes:
        batch: the scheduler's batch.
        ratio: compress ratio of the layer.
        q: bf16 ``[T, H, 512]``.
        k: bf16 ``[T, 512]``.
        compressed: bf16 ``[T, 512]``; None for ratio 0.
        selection: int32 ``[T, index_topk]``; ratio 4 only.
        sink: fp32 ``[H]``.
    """

    batch: ForwardBatch
    ratio: int
    q: Tensor
    k: Tensor
    compressed: Tensor | None
    selection: Tensor | None
    sink: Tensor

    @classmethod
    def of(cls, step: Step, placement: Placement) -> StepInputs:
        """The eager inputs of a scenario's step: its real rows, nothing else."""
        return cls(placement.batch, step.ratio, step.q, step.k, step.compressed, step.selection, step.sink)


def run_eager_step(backend: AttentionBackend, inputs: StepInputs) -> tuple[Tensor, Tensor]:
    """Metadata, stores, selection, attention: ``(out [T, H, 512], lse [T, H])``."""
    backend.init_forward_metadata(inputs.batch)
    return store_and_attend(backend, inputs)


def run_captured_step(backend: AttentionBackend, inputs: StepInputs) -> tuple[Tensor, Tensor]:
    """The same with the in-graph half of the metadata: what a graph records."""
    backend.init_forward_metadata_in_graph(inputs.batch)
    return store_and_attend(backend, inputs)


def store_and_attend(backend: AttentionBackend, inputs: StepInputs) -> tuple[Tensor, Tensor]:
    """The step behind its metadata."""
    *stores, attend = calls_behind_metadata(backend, inputs)
    for store in stores:
        store()
    answer: tuple[Tensor, Tensor] = attend()
    return answer


def calls_behind_metadata(backend: AttentionBackend, inputs: StepInputs) -> tuple[Callable[[], Any], ...]:
    """The calls of the step behind its metadata, in order; the last is the attention."""
    batch = inputs.batch
    calls: list[Callable[[], Any]] = [partial(backend.store_kv, batch, inputs.k)]
    if inputs.compressed is not None:
        calls.append(partial(backend.store_compressed, batch, inputs.ratio, inputs.compressed))
    if inputs.selection is not None:
        calls.append(partial(backend.write_c4_selection, inputs.selection))
    return (*calls, partial(backend.forward, inputs.q, batch, inputs.ratio, inputs.sink))


def entries_stored(step: Step) -> int:
    """Cache entries that the step writes: a token a row, and the compressed entries that it completes."""
    tokens = step.q.shape[0]
    if not step.ratio:
        return tokens
    ends = zip(step.prefix_lens, step.row_counts, strict=True)
    return tokens + sum((prefix + rows) // step.ratio - prefix // step.ratio for prefix, rows in ends)
