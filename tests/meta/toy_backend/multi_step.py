"""The draft runner's backends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any


class ToyMultiStep:
    """N - 1 toy backends over shared pools; see ``dsv4_matrix.protocol.MultiStepDraftBackend``."""

    def __init__(self, kind: Any, runner: Any, num_steps: int) -> None:
        self.kind, self.num_steps = kind, num_steps
        first = kind(runner)
        self.attn_backends = [first, *(kind(runner, first.pools) for _ in range(num_steps - 2))]

    def step_batch(self, batch: Any, step: int) -> Any:
        ahead = 0 if self.kind.has("draft_positions_not_advanced") else step
        column = 0 if self.kind.has("draft_steps_share_slot") else step
        lengths = None if batch.seq_lens_cpu is None else [n + ahead + 1 for n in batch.seq_lens_cpu]
        return replace(
            batch,
            forward_mode="decode",
            seq_lens=batch.seq_lens + ahead + 1,
            seq_lens_cpu=lengths,
            positions=batch.positions + ahead,
            out_cache_loc=batch.out_cache_loc.view(-1, self.num_steps)[:, column],
        )

    def init_forward_metadata(self, batch: Any) -> None:
        for step, backend in enumerate(self.attn_backends):
            backend.init_forward_metadata(self.step_batch(batch, step))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, batch: Any, *, in_capture: bool = False) -> None:
        for step, backend in enumerate(self.attn_backends):
            backend.init_forward_metadata_out_graph(self.step_batch(batch, step), in_capture=in_capture)

    def init_forward_metadata_in_graph(self, batch: Any) -> None:
        for step, backend in enumerate(self.attn_backends):
            backend.init_forward_metadata_in_graph(self.step_batch(batch, step))

    def on_after_cuda_graph_warmup(self) -> None:
        for backend in self.attn_backends:
            backend.on_after_cuda_graph_warmup()
