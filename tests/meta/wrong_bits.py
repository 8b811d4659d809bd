"""The Triton backend with one defect each that leaves its numbers right and its bits not: for the gate alone to find.

``module:attr`` loads them: ``dsv4-matrix gate --backend wrong_bits:SplitsFollowBatch``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from dsv4_triton import DSV4TritonBackend, attention
from dsv4_triton.geometry import WINDOW
from torch import Tensor


@contextmanager
def patched(name: str, value: Any) -> Iterator[None]:
    """Another value of a name of the attention's host side, for one call."""
    sound = getattr(attention, name)
    setattr(attention, name, value)
    try:
        yield
    finally:
        setattr(attention, name, sound)


class SplitsFollowBatch(DSV4TritonBackend):
    """More rows in a batch, fewer keys in a split."""

    DETERMINISM = DSV4TritonBackend.DETERMINISM  # what it promises, and does not keep

    def attend(self, q: Tensor, *rest: Any):
        with patched("SPLIT_KEYS", 640 if q.shape[0] <= 2 else 64):
            return super().attend(q, *rest)


class TileFollowsBatch(DSV4TritonBackend):
    """A batch of several requests gets a tile of fewer keys, as an autotuner would choose by its size."""

    DETERMINISM = DSV4TritonBackend.DETERMINISM  # what it promises, and does not keep

    def attend(self, q: Tensor, *rest: Any):
        sound = attention.target_of
        smaller = (
            sound if q.shape[0] <= 2 else lambda device: replace(sound(device), block_n=sound(device).block_n // 2)
        )
        with patched("target_of", smaller):
            return super().attend(q, *rest)


class OrderFollowsHash(DSV4TritonBackend):
    """A full window is listed in the order of a set of strings, which the process's hash seed decides."""

    DETERMINISM = DSV4TritonBackend.DETERMINISM  # what it promises, and does not keep

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        order = sorted(range(WINDOW), key=lambda column: hash(f"column {column}"))
        self._order = torch.tensor(order, device=self.runner.req_to_token.device)

    def attend(self, q: Tensor, k_cache: Tensor, indices: Tensor, topk_length: Tensor, *rest: Any):
        full = (topk_length == WINDOW).view(-1, 1, 1)
        listed = torch.where(full, indices[..., self._order], indices)
        return super().attend(q, k_cache, listed, topk_length, *rest)


class PositionInBatch(DSV4TritonBackend):
    """The last row of a batch is summed in the opposite order."""

    DETERMINISM = DSV4TritonBackend.DETERMINISM  # what it promises, and does not keep

    def attend(self, q: Tensor, k_cache: Tensor, indices: Tensor, topk_length: Tensor, *rest: Any):
        turned = (topk_length == indices.shape[-1]).view(-1, 1, 1).clone()
        if q.shape[0] > 1:
            turned[:-1] = False
        return super().attend(q, k_cache, torch.where(turned, indices.flip(-1), indices), topk_length, *rest)


class ReadsPastLength(DSV4TritonBackend):
    """One compressed entry more than a row has is read: the first one of the row before it."""

    DETERMINISM = DSV4TritonBackend.DETERMINISM  # what it promises, and does not keep

    def attend(self, q: Tensor, k_cache: Tensor, indices: Tensor, topk_length: Tensor, sink: Any, *extra: Any):
        if extra:
            cache, entries, length = extra
            column = torch.arange(entries.shape[-1], device=entries.device)
            beyond = (column == length.view(-1, 1)).unsqueeze(1)
            extra = (cache, torch.where(beyond, entries[..., :1].roll(1, 0), entries), length + 1)
        return super().attend(q, k_cache, indices, topk_length, sink, *extra)


class NeighbourLeaks(DSV4TritonBackend):
    """All queries of a batch are added up and multiplied by zero: NaN of one row reaches every other."""

    DETERMINISM = DSV4TritonBackend.DETERMINISM  # what it promises, and does not keep

    def attend(self, q: Tensor, *rest: Any):
        return super().attend(q + 0 * q.sum(0, keepdim=True), *rest)


class ChangesBetweenRuns(DSV4TritonBackend):
    """The last three bits of each head's log-sum-exp are what the process happened to start with."""

    DETERMINISM = DSV4TritonBackend.DETERMINISM  # what it promises, and does not keep

    NOISE = os.urandom(128)

    def __init__(self, runner: Any, cache: Any = None) -> None:
        super().__init__(runner, cache)
        last_bits = [byte & 7 for byte in self.NOISE[: runner.num_heads]]
        self.noise = torch.tensor(last_bits, dtype=torch.int32, device=runner.device).view(1, -1, 1)

    def attend(self, *arguments: Any):
        out, lse = super().attend(*arguments)
        return out, (lse.view(torch.int32) ^ self.noise).view(torch.float32)


class AccumulatorsFollowBatch(DSV4TritonBackend):
    """In a batch of several rows the last bit of one sum of a row's first split differs, and rounding hides it."""

    DETERMINISM = DSV4TritonBackend.DETERMINISM  # what it promises, and does not keep

    def forward_with_accumulators(self, q: Tensor, *rest: Any):
        out, lse, kept = super().forward_with_accumulators(q, *rest)
        if q.shape[0] > 1:
            for values in kept:
                if values is not None:
                    values.view(torch.int32)[0, 0, 0] ^= 1
        return out, lse, kept


class ChunksMoveTiles(DSV4TritonBackend):
    """A prefill of few rows a request gets a smaller tile: a request's bits follow how its prompt was cut."""

    DETERMINISM = DSV4TritonBackend.DETERMINISM  # what it promises, and does not keep

    def forward(self, q: Tensor, batch: Any, *rest: Any):
        sound = attention.target_of
        few = batch.forward_mode == "extend" and batch.extend_seq_lens_cpu and max(batch.extend_seq_lens_cpu) < 4
        smaller = (lambda device: replace(sound(device), block_n=sound(device).block_n // 2)) if few else sound
        with patched("target_of", smaller):
            return super().forward(q, batch, *rest)


class Undeclared(DSV4TritonBackend):
    """Says nothing about its bits."""

    DETERMINISM = ()


class SerialOnly(DSV4TritonBackend):
    """Declares that only single requests keep their bits."""

    DETERMINISM = tuple({**path, "concurrency": "serial_only"} for path in DSV4TritonBackend.DETERMINISM)
