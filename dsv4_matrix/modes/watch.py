"""Watches what a backend may not touch: its inputs, the scheduler's tables, cache bytes that it does not own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import torch
from torch import Tensor

from dsv4_matrix.modes.step import StepInputs
from dsv4_matrix.protocol import RunnerConfig

#: Bytes of one packed entry: the most that storing it may change.
ENTRY_BYTES = 584
#: Pools are compared in pieces, so that a pool beyond 2 GiB needs no mask of its own size.
_PIECE_BYTES = 1 << 28


def batch_tensors(inputs: StepInputs) -> dict[str, Tensor]:
    """Every tensor that the backend is handed, by name."""
    named = {"q": inputs.q, "k": inputs.k, "sink": inputs.sink}
    if inputs.compressed is not None:
        named["compressed"] = inputs.compressed
    if inputs.selection is not None:
        named["selection"] = inputs.selection
    for item in fields(inputs.batch):
        value = getattr(inputs.batch, item.name)
        if isinstance(value, Tensor):
            named[f"batch.{item.name}"] = value
    return named


class InputWatch:
    """Copies of what the backend may only read; ``written`` names those that no longer hold the same bytes."""

    def __init__(self, runner: RunnerConfig, *steps: StepInputs) -> None:
        self._watched = {
            "req_to_token": runner.req_to_token,
            "full_to_swa_index_mapping": runner.full_to_swa_index_mapping,
        }
        for number, inputs in enumerate(steps):
            suffix = f" of step {number}" if len(steps) > 1 else ""
            self._watched |= {f"{name}{suffix}": tensor for name, tensor in batch_tensors(inputs).items()}
        self._before = {name: tensor.clone() for name, tensor in self._watched.items()}

    def written(self) -> list[str]:
        """Names of modified tensors, one wait for the device."""
        flags = [_differ(self._before[name], tensor) for name, tensor in self._watched.items()]
        names = list(self._watched)
        return [name for name, flag in zip(names, torch.stack(flags).tolist(), strict=True) if flag]


class CacheWatch:
    """A copy of all cache bytes, to count those that differ now. The first dimension of a buffer is its pages."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self._buffers = dict(buffers)
        self._before = {name: buffer.clone() for name, buffer in buffers.items()}

    def changed(self) -> tuple[int, int]:
        """Bytes that differ over all pools, and those of them in dummy pages; one wait for the device."""
        everywhere: list[Tensor] = []
        dummy: list[Tensor] = []
        for name, now in self._buffers.items():
            pages = max(1, _PIECE_BYTES // max(1, now[:1].numel()))
            pieces = zip(now.split(pages), self._before[name].split(pages), strict=True)
            for number, (piece, before) in enumerate(pieces):
                different = piece != before
                everywhere.append(torch.count_nonzero(different))
                if not number:
                    dummy.append(torch.count_nonzero(different[:1]))
        if not everywhere:
            return 0, 0
        device = everywhere[-1].device
        counts = torch.stack([count.to(device) for count in (*dummy, *everywhere)]).tolist()
        return sum(counts[len(dummy) :]), sum(counts[: len(dummy)])


def _differ(before: Tensor, after: Tensor) -> Tensor:
    """Whether any bit differs; NaN compares by its bits."""
    integer = {torch.bfloat16: torch.int16, torch.float32: torch.int32}.get(after.dtype)
    if integer is None:
        return (before != after).any()
    return (before.view(integer) != after.view(integer)).any()


def same_bits(one: Tensor, other: Tensor) -> Tensor:
    """bool ``[T]``: rows whose bits agree. NaN payloads and signed zeros count."""
    integer = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[one.dtype]
    equal: Tensor = one.contiguous().view(integer) == other.contiguous().view(integer)
    return equal.flatten(1).all(1)
