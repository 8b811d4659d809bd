"""What every request says: its keys, compressed entries and rejected drafts, drawn once and cut to each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dsv4_matrix.cases.batch import Span, StepPlan
from dsv4_matrix.cases.streams import stream

HEAD_DIM = 512
#: K = mu + z: mu is +-MEAN in each element, shared by a request's keys; z is normal and K is clipped. A shared mean
#: lets a query aim away from all keys at once, which brings the log-sum-exp down to a sink. Below 1 an element is
#: stored within 1/32, so that no weighting of keys, however they cancel, leaves the contract by quantisation alone.
MEAN = 0.125
DEVIATION = 0.375
CLIP = 0.97
#: Keys of request r are this much smaller, queries as much larger, so that every score stays as it is and every budget
#: scales along. It shows a cache that does not scale its FP8 groups, or scales them all alike; the last magnitude puts
#: the groups on both sides of the format's floor of 1e-4. Larger keys would leave the contract by quantisation alone.
MAGNITUDES = (1.0, 2.0**-6, 2.0**-13)
#: Tokens this far behind the first row repeat a block: no row sees them, so that they need not be drawn.
_FAR = 512
_BLOCK = 256

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


@dataclass(frozen=True)
class Bank:
    """The keys of one step, request after request, each with one decoy behind its last.

    Attributes:
        tokens: bf16 ``[sum L_r, 512]``; ``L_r`` is the request's length after the step, plus one.
        token_base: int64 ``[bs + 1]``.
        entries: bf16 ``[sum E_r, 512]``; ``E_r`` is the complete entries after the step, plus one. Empty for ratio 0.
        entry_base: int64 ``[bs + 1]``.
        mean: fp32 ``[bs, 512]``, mu of each request, in its magnitude.
        magnitude: fp32 ``[bs]``, see ``MAGNITUDES``.

    Tensors are on the case's device.
    """

    tokens: Tensor
    token_base: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    entries: Tensor
    entry_base: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    mean: Tensor
    magnitude: FloatArray


@dataclass(frozen=True)
class _Committed:
    """A request as serial decoding would leave it: what every step that never speculated sees."""

    mean: Tensor
    tokens: Tensor
    entries: Tensor


@dataclass(frozen=True)
class _Rejected:
    """Keys that a verify step stored and the request then dropped: from this position, from this entry."""

    position: int
    tokens: Tensor
    entry: int
    entries: Tensor


class Content:
    """All keys of a case, drawn on the CPU, whatever the device, and put together on the device.

    A token that stays committed has the same K in every step. A rejected draft has a K of its own in the verify
    step, and becomes the decoy of the step that follows: what a backend would see that forgot to roll back.
    """

    def __init__(self, plans: Sequence[StepPlan], ratio: int, seed: int, device: str) -> None:
        self._ratio = ratio
        self._device = device
        self._committed: dict[int, _Committed] = {}
        self._rejected: dict[int, _Rejected] = {}
        length: dict[int, int] = {}
        first: dict[int, int] = {}
        for plan in plans:
            for span in plan.spans:
                length[span.request] = max(length.get(span.request, 0), span.total)
                first.setdefault(span.request, span.prefix)
                if span.kept < span.rows:
                    self._rejected[span.request] = self._draw_rejected(span, seed)
        for request, total in length.items():
            mean, size = _mean(seed, request), magnitude(request)
            self._committed[request] = _Committed(
                torch.from_numpy(mean).to(device) * size,
                self._long(stream(seed, "tokens", request), mean, total + 1, first[request] - _FAR) * size,
                self._keys(stream(seed, "entries", request), mean, total // ratio + 1 if ratio else 0) * size,
            )

    def bank(self, plan: StepPlan) -> Bank:
        """The keys as of ``plan``: committed ones, the step's own rows, and decoys."""
        empty = torch.empty(0, HEAD_DIM, dtype=torch.bfloat16, device=self._device)
        tokens: list[Tensor] = []
        entries: list[Tensor] = []
        for span in plan.spans:
            committed = self._committed[span.request]
            rejected = self._rejected.get(span.request)
            tail = (rejected.position, rejected.tokens) if rejected else None
            tokens.append(_overlaid(committed.tokens, span.total + 1, span, tail))
            tail = (rejected.entry, rejected.entries) if rejected else None
            count = span.total // self._ratio + 1 if self._ratio else 0
            entries.append(_overlaid(committed.entries, count, span, tail))
        means = [self._committed[span.request].mean for span in plan.spans]
        return Bank(
            tokens=torch.cat([empty, *tokens]),
            token_base=_base(tokens),
            entries=torch.cat([empty, *entries]),
            entry_base=_base(entries),
            mean=torch.stack(means) if means else empty.float(),
            magnitude=np.array([magnitude(span.request) for span in plan.spans], np.float32),
        )

    def _draw_rejected(self, span: Span, seed: int) -> _Rejected:
        mean, size = _mean(seed, span.request), magnitude(span.request)
        position = span.prefix + span.kept
        entry = position // self._ratio if self._ratio else 0
        stored = span.total // self._ratio - entry if self._ratio else 0
        return _Rejected(
            position,
            self._keys(stream(seed, "rejected tokens", span.request), mean, span.total - position) * size,
            entry,
            self._keys(stream(seed, "rejected entries", span.request), mean, stored) * size,
        )

    def _keys(self, generator: np.random.Generator, mean: FloatArray, count: int) -> Tensor:
        drawn = generator.standard_normal((count, HEAD_DIM), dtype=np.float32)
        drawn *= DEVIATION
        drawn += mean
        return torch.from_numpy(np.clip(drawn, -CLIP, CLIP, out=drawn)).to(torch.bfloat16).to(self._device)

    def _long(self, generator: np.random.Generator, mean: FloatArray, count: int, near: int) -> Tensor:
        """``count`` keys, of which those before ``near`` repeat a block of ``_BLOCK``: long contexts stay cheap."""
        if near <= _BLOCK:
            return self._keys(generator, mean, count)
        block = self._keys(generator, mean, _BLOCK)
        far = block.repeat(-(-near // _BLOCK), 1)[:near]
        return torch.cat([far, self._keys(generator, mean, count - near)])


def magnitude(request: int) -> float:
    """Size of a request's keys, a power of two: scaling BF16 by it is exact."""
    return MAGNITUDES[request % len(MAGNITUDES)]


def _overlaid(committed: Tensor, count: int, span: Span, tail: tuple[int, Tensor] | None) -> Tensor:
    """The first ``count`` committed keys; rejected ones over them in the verify step, as the decoy in the next."""
    keys = committed[:count]
    if tail is None:
        return keys
    start, rejected = tail
    # In the verify step they stand at their places; afterwards only the decoy (the last key) may be one of them.
    begin, end = (start, start + len(rejected)) if span.kept < span.rows else (count - 1, count)
    begin, end = max(begin, start), min(end, start + len(rejected), count)
    if begin < end:
        keys = keys.clone()
        keys[begin:end] = rejected[begin - start : end - start]
    return keys


def _base(parts: Sequence[Tensor]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)


def _mean(seed: int, request: int) -> FloatArray:
    signs = stream(seed, "mean", request).integers(0, 2, HEAD_DIM) * 2 - 1
    return (signs * MEAN).astype(np.float32)
