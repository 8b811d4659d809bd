"""The toy backend with defects that a whole matrix once let through: each shows only beyond some size or magnitude.

``module:attr`` loads them: ``dsv4-matrix run --backend quiet_defects:NoRunningMaximum``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from toy_backend import ToyBackend


class NoRunningMaximum(ToyBackend):
    """exp is summed as it is, which overflows in fp32 where a score exceeds 88.7."""

    def forward(self, q: Tensor, batch: Any, compress_ratio: int, attn_sink: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(q, batch, compress_ratio, attn_sink)
        overflown = lse > 88.7
        return torch.where(overflown[..., None], torch.nan, out), torch.where(overflown, torch.inf, lse)


class FixedExponent(ToyBackend):
    """FP8 groups are all scaled by one power of two; what is read is scaled back by the same."""

    exponent = 0

    def _pack(self, k: Tensor) -> Tensor:
        packed = super()._pack(k)
        scaled = (k[:, :448].float() / 2.0**self.exponent).clamp(-448, 448)
        packed[:, :448] = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
        packed[:, 576:583] = torch.where(packed[:, 576:583] == 255, 255, 127 + self.exponent)
        return packed


class Unscaled(FixedExponent):
    """A plain cast to FP8, right for the range that keys of one model happen to have."""


class AllScaledAlike(FixedExponent):
    """The exponent of keys near one, for every group."""

    exponent = -8


class FirstTileOfRows(ToyBackend):
    """Rows from the 65th on lose their newest key, as if their tile started one row early."""

    first_lost = 64

    def _metadata(self, batch: Any) -> Any:
        made = super()._metadata(batch)
        made.swa[self.first_lost :, 0] = -1
        return made


class ThirtyTwoRequests(FirstTileOfRows):
    """The same from the 33rd row on; every row of a decode is a request."""

    first_lost = 32


class EntriesCut(ToyBackend):
    """Compressed entries of one pool beyond the 512th are not read."""

    pool = ""

    def _attend(self, q: Tensor, batch: Any, compress_ratio: int, attn_sink: Tensor) -> tuple[Tensor, Tensor]:
        getattr(self._ready(), self.pool)[:, 512:] = -1
        return super()._attend(q, batch, compress_ratio, attn_sink)


class SelectionCutAt512(EntriesCut):
    """A selection of 1024 is read as one of 512."""

    pool = "c4"


class C128EntriesCutAt512(EntriesCut):
    """A C128 index list has room for 512 entries."""

    pool = "c128"


class LengthsIn16Bits(ToyBackend):
    """Lengths pass through int16."""

    def _rows(self, batch: Any) -> tuple[Tensor, Tensor]:
        row, lens = super()._rows(batch)
        return row, lens.to(torch.int16).long()
