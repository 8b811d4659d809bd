"""The three pools of a model runner, and which of them a compress ratio reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsv4_triton.geometry import PAGE_SIZE
from dsv4_triton.pool import PackedPool

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from dsv4_triton.runner import RunnerConfig


class KVCache:
    """Window tokens by SWA slot; compressed entries by ``full location // ratio``, page ids shared with full pages.

    Attributes:
        swa: every layer's window tokens, ``swa_page_size`` a page.
        compressed: pools of ratio 4 (64 entries a page) and 128 (2 entries a page).
    """

    def __init__(self, runner: RunnerConfig) -> None:
        self.swa = PackedPool(runner.num_swa_pages, runner.swa_page_size, runner.req_to_token.device)
        self.compressed = {
            ratio: PackedPool(runner.num_pages, PAGE_SIZE // ratio, runner.req_to_token.device) for ratio in (4, 128)
        }

    def buffers(self) -> Mapping[str, Tensor]:
        """The raw uint8 buffers by pool name."""
        return {"swa": self.swa.buffer, "c4": self.compressed[4].buffer, "c128": self.compressed[128].buffer}
