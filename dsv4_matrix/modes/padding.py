"""Padding a batch to a captured size: whole request groups behind the real ones, by one table of fields.

The scheduler's batch is never changed: padding makes another one, so that there is nothing to restore after the forward
but to cut the answer back to the real rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import torch
from torch import Tensor

from dsv4_matrix.protocol import ForwardBatch

#: ``seq_lens`` of a pad request, as serving engines fill it.
SEQ_LEN_FILL = 1
#: Stands for the rows of a request, where a fill is not a constant.
WIDTH = -1

#: Fields of one value a request, with what a pad request holds; the host copies follow their tensors.
REQUEST_FIELDS = {"req_pool_indices": 0, "seq_lens": SEQ_LEN_FILL, "extend_seq_lens": WIDTH}
#: Fields of one value a row: pad rows are at position 0 and store to location 0, which is nowhere.
ROW_FIELDS = {"out_cache_loc": 0, "positions": 0}


@dataclass(frozen=True)
class PadSpec:
    """``requests`` real requests of ``width`` rows each, padded to ``padded_requests``."""

    requests: int
    padded_requests: int
    width: int

    def __post_init__(self) -> None:
        if self.requests > self.padded_requests:
            raise ValueError(
                f"{self.requests} requests do not fit a graph of {self.padded_requests}; declare a larger bucket"
            )

    @property
    def rows(self) -> int:
        return self.requests * self.width

    @property
    def padded_rows(self) -> int:
        return self.padded_requests * self.width

    def fill(self, value: int) -> int:
        """The number that a table's value stands for."""
        return self.width if value == WIDTH else value


def whole_groups(requests: int, width: int, alignment: int) -> int:
    """Requests after padding ``requests`` of ``width`` rows so that rows are a multiple of ``alignment``.

    Never a part of a request: rows become a multiple of lcm(alignment, width). With width 6 and alignment 8, 33
    requests become 36 and 38 become 40; padding 38 x 6 rows to 232 would leave a group of 4.
    """
    group = lcm(alignment, width)
    return -(-requests * width // group) * group // width


def pad(batch: ForwardBatch, spec: PadSpec) -> ForwardBatch:
    """A copy of ``batch`` with pad requests behind its own.

    Raises ValueError where the batch is not what ``spec`` says, as when it is padded already or its requests differ in
    rows: a captured graph has the same number for all.
    """
    rows = batch.positions.shape[0]
    if (batch.batch_size, rows) != (spec.requests, spec.rows):
        raise ValueError(
            f"a batch of {batch.batch_size} requests and {rows} rows cannot be padded as {spec.requests} requests of "
            f"{spec.width} rows; a graph has whole request groups of equal width"
        )
    padded: dict[str, Any] = {}
    for fields, length in ((REQUEST_FIELDS, spec.padded_requests), (ROW_FIELDS, spec.padded_rows)):
        for name, value in fields.items():
            if (tensor := getattr(batch, name)) is not None:
                padded[name] = _extended(tensor, length, spec.fill(value))
            if (host := getattr(batch, f"{name}_cpu", None)) is not None:
                padded[f"{name}_cpu"] = [*host, *[spec.fill(value)] * (length - len(host))]
    return replace(batch, **padded)


def _extended(values: Tensor, length: int, fill: int) -> Tensor:
    return torch.cat([values, values.new_full((length - values.shape[0],), fill)])
