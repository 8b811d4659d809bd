"""What an engine does to a batch before and after a padded forward, as data and pure functions: pad, unpad, split.

Ranks that work in step run equal shapes, so each pads its batch and takes the pad rows off afterwards. SGLang's rules
(``forward_batch_info``, ``two_batch_overlap``) are uneven: after a verify most fields stay padded, ``out_cache_loc``
always does, and its pad rows name slot 0. Stated here apart from the code that pads for graphs, so that one can be held
against the other. Fields are tuples of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

Row = TypeVar("Row")


class Phase(StrEnum):
    """Which of the three sets of rules holds after the forward."""

    DECODE = "decode"
    EXTEND = "extend"
    DRAFT_DECODE = "draft_decode"
    TARGET_VERIFY = "target_verify"


class Unit(StrEnum):
    """What a field has one element of."""

    TOKEN = "token"
    REQUEST = "request"


#: Every field that padding touches. A field that is not here cannot be padded or handed to a child by accident.
FIELDS: Mapping[str, Unit] = {
    "input_ids": Unit.TOKEN,
    "positions": Unit.TOKEN,
    "out_cache_loc": Unit.TOKEN,
    "req_pool_indices": Unit.REQUEST,
    "seq_lens": Unit.REQUEST,
    "seq_lens_cpu": Unit.REQUEST,
    "extend_seq_lens": Unit.REQUEST,
}
#: Padded with the backend's fill length; everything else with 0, which is the dummy slot and row.
FILLED = ("seq_lens", "seq_lens_cpu")

_REQUESTS = ("req_pool_indices", "seq_lens", "seq_lens_cpu")
#: Fields that get their own length back, by phase; all others stay padded.
RESTORED: Mapping[Phase, tuple[str, ...]] = {
    Phase.DECODE: ("positions", *_REQUESTS),
    Phase.EXTEND: ("positions", *_REQUESTS),
    Phase.DRAFT_DECODE: ("positions", *_REQUESTS),
    Phase.TARGET_VERIFY: (),
}


class PaddingError(ValueError):
    """Numbers that do not fit, or a batch that was padded twice."""


@dataclass(frozen=True)
class PadSpec:
    """Sizes before and after. ``width``: tokens a request where that is uniform (decode 1, verify D), else 0."""

    real_bs: int
    padded_bs: int
    real_tokens: int
    padded_tokens: int
    fill: int = 1
    width: int = 0

    def __post_init__(self) -> None:
        if self.padded_bs < self.real_bs or self.padded_tokens < self.real_tokens:
            raise PaddingError(
                f"padding to {self.padded_bs} requests and {self.padded_tokens} tokens, below the real {self.real_bs} "
                f"and {self.real_tokens}"
            )
        if self.width and self.padded_tokens != self.padded_bs * self.width:
            raise PaddingError(
                f"{self.padded_tokens} padded tokens are not {self.padded_bs} requests of {self.width} tokens; pad by "
                "whole requests (verify_padding)"
            )


@dataclass(frozen=True)
class Originals:
    """What a padded batch was. A batch without them was never padded."""

    batch_size: int
    num_tokens: int


@dataclass(frozen=True)
class Batch:
    """A batch by its fields; ``width`` as in ``PadSpec``."""

    phase: Phase
    batch_size: int
    fields: Mapping[str, tuple[int, ...]]
    width: int = 0
    originals: Originals | None = None

    def __post_init__(self) -> None:
        if unknown := sorted(self.fields.keys() - FIELDS.keys()):
            raise PaddingError(f"fields {', '.join(unknown)} have no rule; add them to FIELDS with one")


def rank_tokens(counts: Sequence[int], alignment: int, *, all_equal: bool) -> tuple[int, ...]:
    """Padded token count of each rank: a multiple of ``alignment``; the largest one for all if ``all_equal``."""
    rounded = [-(-count // alignment) * alignment for count in counts]
    return tuple([max(rounded, default=0)] * len(rounded) if all_equal else rounded)


def verify_padding(requests: int, width: int, alignment: int, *, fill: int = 1) -> PadSpec:
    """Padding of a verify batch: tokens a multiple of ``alignment``, and whole requests of ``width`` tokens.

    Rounding tokens alone breaks the batch: 38 requests of 6 tokens are 228, 232 when rounded to 8, and no reshape to
    ``(requests, 6)`` takes that.
    """
    group = math.lcm(width, alignment)
    tokens = -(-requests * width // group) * group
    return PadSpec(requests, tokens // width, requests * width, tokens, fill, width)


def pad(batch: Batch, spec: PadSpec) -> Batch:
    """``batch`` with pad rows after the real ones; remembers what it was.

    Raises:
        PaddingError: already padded, whose originals would be lost, or sizes that are not the batch's.
    """
    if batch.originals is not None:
        raise PaddingError(
            f"batch of {batch.originals.batch_size} requests is padded already; unpad it, or its true size is lost"
        )
    sizes = {Unit.TOKEN: (spec.real_tokens, spec.padded_tokens), Unit.REQUEST: (spec.real_bs, spec.padded_bs)}
    padded = {}
    for name, values in batch.fields.items():
        real, wanted = sizes[FIELDS[name]]
        if len(values) != real:
            raise PaddingError(f"{name} has {len(values)} elements, the padding is of {real}")
        padded[name] = values + (spec.fill if name in FILLED else 0,) * (wanted - real)
    return replace(batch, batch_size=spec.padded_bs, fields=padded, originals=Originals(spec.real_bs, spec.real_tokens))


def unpad(batch: Batch) -> Batch:
    """``batch`` as its engine leaves it after the forward: only ``RESTORED`` fields are cut. Unpadded: as it is."""
    if batch.originals is None:
        return batch
    lengths = {Unit.TOKEN: batch.originals.num_tokens, Unit.REQUEST: batch.originals.batch_size}
    fields = {
        name: values[: lengths[FIELDS[name]]] if name in RESTORED[batch.phase] else values
        for name, values in batch.fields.items()
    }
    return replace(batch, batch_size=batch.originals.batch_size, fields=fields, originals=None)


def unpad_rows(batch: Batch, rows: Sequence[Row]) -> Sequence[Row]:
    """The real ones of a padded batch's output rows: logits, one a token (verify, extend) or one a request."""
    if batch.originals is None:
        return rows
    if batch.phase is Phase.TARGET_VERIFY:
        return rows[: batch.originals.batch_size * batch.width]
    return rows[: batch.originals.num_tokens if batch.phase is Phase.EXTEND else batch.originals.batch_size]


def real_slots(batch: Batch) -> tuple[int, ...]:
    """The slots that a writer after the forward may touch: ``out_cache_loc`` itself keeps its pad rows, on slot 0."""
    slots = batch.fields["out_cache_loc"]
    return slots if batch.originals is None else slots[: batch.originals.num_tokens]


def child(batch: Batch, first: int, last: int) -> Batch:
    """Requests ``first`` to ``last`` - 1 as a batch of their own, for two-batch overlap.

    It has no originals: with its parent's it would cut itself by the parent's size. It is padded anew, and the parent
    does the final unpad. PaddingError unless requests have a uniform ``width``.
    """
    if not batch.width:
        raise PaddingError(f"a {batch.phase.value} batch of uneven requests cannot be split by width")
    bounds = {Unit.REQUEST: (first, last), Unit.TOKEN: (first * batch.width, last * batch.width)}
    fields = {name: values[slice(*bounds[FIELDS[name]])] for name, values in batch.fields.items()}
    return Batch(batch.phase, last - first, fields, batch.width)
