"""What every request says: its keys, compressed entries and rejected drafts, drawn once and cut to each step."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

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
#: Threads that draw beside each other. Each draw has a generator of its own, so that their order decides nothing, and
#: numpy lets other threads run while it fills an array.
_DRAWERS = 4

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
#: Arrays that are being drawn.
_Draw = Future[list[FloatArray]]


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
        dropped: dict[int, Span] = {}
        for plan in plans:
            for span in plan.spans:
                length[span.request] = max(length.get(span.request, 0), span.total)
                first.setdefault(span.request, span.prefix)
                if span.kept < span.rows:
                    dropped[span.request] = span
        with ThreadPoolExecutor(_DRAWERS) as drawers:
            draw = partial(_begin_draw, drawers, seed)
            committed = {
                request: (
                    draw("tokens", request, *_long_counts(total + 1, first[request] - _FAR)),
                    draw("entries", request, total // ratio + 1 if ratio else 0),
                )
                for request, total in length.items()
            }
            rejected = {
                request: (
                    draw("rejected tokens", request, span.total - span.prefix - span.kept),
                    draw("rejected entries", request, self._entries_dropped(span)),
                )
                for request, span in dropped.items()
            }
            for request, (tokens, entries) in committed.items():
                mean, size = torch.from_numpy(_mean(seed, request)).to(device), magnitude(request)
                near = first[request] - _FAR
                self._committed[request] = _Committed(
                    mean * size, self._long(tokens, near) * size, self._moved(entries)[0] * size
                )
            for request, (tokens, entries) in rejected.items():
                span, size = dropped[request], magnitude(request)
                position = span.prefix + span.kept
                self._rejected[request] = _Rejected(
                    position,
                    self._moved(tokens)[0] * size,
                    position // ratio if ratio else 0,
                    self._moved(entries)[0] * size,
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

    def _entries_dropped(self, span: Span) -> int:
        return span.total // self._ratio - (span.prefix + span.kept) // self._ratio if self._ratio else 0

    def _moved(self, drawn: _Draw) -> list[Tensor]:
        """bf16, on the case's device, once they are drawn."""
        return [torch.from_numpy(part).to(torch.bfloat16).to(self._device) for part in drawn.result()]

    def _long(self, drawn: _Draw, near: int) -> Tensor:
        """Keys of which those before ``near`` repeat a block of ``_BLOCK``: long contexts stay cheap."""
        parts = self._moved(drawn)
        if len(parts) == 1:
            return parts[0]
        block, rest = parts
        return torch.cat([block.repeat(-(-near // _BLOCK), 1)[:near], rest])


def _long_counts(count: int, near: int) -> tuple[int, ...]:
    """What ``_long`` draws for ``count`` keys: all of them, or the block and those from ``near`` on."""
    return (count,) if near <= _BLOCK else (_BLOCK, count - near)


def _begin_draw(drawers: Executor, seed: int, name: str, request: int, *counts: int) -> _Draw:
    """Keys of ``request`` from the stream of that name: one array for each of ``counts``, drawn one after the other."""
    mean, generator = _mean(seed, request), stream(seed, name, request)
    return drawers.submit(lambda: [_drawn(generator, mean, count) for count in counts])


def _drawn(generator: np.random.Generator, mean: FloatArray, count: int) -> FloatArray:
    drawn = generator.standard_normal((count, HEAD_DIM), dtype=np.float32)
    drawn *= DEVIATION
    drawn += mean
    return np.clip(drawn, -CLIP, CLIP, out=drawn)


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
