"""The needle's accumulators in every batch of a composition, from a backend that gives them.

One more eager leg, and no longer than it must be: a needle that keeps none in the first batch keeps none in any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dsv4_matrix.cases.compose import Composition
from dsv4_matrix.cases.poison import poison_pools
from dsv4_matrix.modes.eager import prepare, watched_eager_step
from dsv4_matrix.modes.trace import LegEnded, Notebook, describe
from dsv4_matrix.protocol import AttentionBackend, BackendFactory, ForwardBatch, GivesAccumulators


@dataclass(frozen=True)
class RowSums:
    """What one row of the needle kept in one batch: the batch's kind, the step and row of the needle alone."""

    kind: str
    step: int
    row: int
    values: Tensor | None


def drive_accumulators(
    composition: Composition, factory: BackendFactory
) -> tuple[tuple[RowSums, ...], tuple[str, ...]]:
    """Every answer, and violations. Nothing of a backend that gives no accumulators. Raises BackendError."""
    scenario, notebook = composition.scenario, Notebook()
    found: list[RowSums] = []
    try:
        with notebook.backend_at_work("accumulators, building the backend"):
            backend = factory(scenario.runner)
            if not isinstance(backend, GivesAccumulators):
                return (), ()
            poison_pools(backend.kv_buffers())
        recording: Any = _Recording(backend)
        for number, (step, placement) in enumerate(zip(scenario.steps, scenario.placements, strict=True)):
            place = f"accumulators, step {number}"
            prepare(recording, scenario.runner, placement, step.ratio, notebook, f"history of {place}")
            watched_eager_step(recording, scenario.runner, step, placement, notebook, place)
            own, first = composition.own_step[number], composition.part[number].start
            found += [
                RowSums(composition.kinds[number], own, first + at, values)
                for rows in composition.rows[number]
                for at, values in enumerate(recording.kept[rows])
            ]
            if all(row.values is None for row in found):
                return (), tuple(notebook.violations)
    except LegEnded:
        pass
    return tuple(found), tuple(notebook.violations)


class _Recording:
    """The backend, with what its last forward kept, by row."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend: Any = backend
        self.kept: Sequence[Tensor | None] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward(self, q: Tensor, batch: ForwardBatch, compress_ratio: int, attn_sink: Tensor) -> tuple[Tensor, Tensor]:
        answer = self._backend.forward_with_accumulators(q, batch, compress_ratio, attn_sink)
        owed = (
            "forward_with_accumulators must return (out, lse, accumulators), the last a sequence that holds a tensor "
            f"or None for each of {len(q)} rows"
        )
        if not (isinstance(answer, tuple) and len(answer) == 3):
            raise TypeError(f"{owed}; got {describe(answer)}")
        out, lse, self.kept = answer
        if not isinstance(self.kept, (Sequence, Tensor)):
            raise TypeError(f"{owed}; got {describe(self.kept)} for it")
        if len(self.kept) != len(q):
            raise TypeError(f"{owed}; got one of {len(self.kept)}")
        return out, lse
