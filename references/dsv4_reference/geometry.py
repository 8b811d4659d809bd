"""Sizes of the model and of its cache, stated here on purpose: the oracle shares no constant with what it judges.

Elements unless a name says bytes. Source: SGLang's DeepSeek-V4 KV pool and FlashMLA's packed FP8 cache.
"""

from __future__ import annotations

from typing import Final

HEAD_DIM: Final = 512
NOPE: Final = 448  # quantised to e4m3, with one scale a group
ROPE: Final = 64  # kept in bf16
GROUP: Final = 64
GROUPS: Final = NOPE // GROUP

WINDOW: Final = 128  # a query attends itself and the 127 tokens before it
RATIOS: Final = (0, 4, 128)

DATA_BYTES: Final = NOPE + 2 * ROPE
SCALE_BYTES: Final = GROUPS + 1  # the eighth byte is never written
TOKEN_BYTES: Final = DATA_BYTES + SCALE_BYTES


def page_stride(page_entries: int) -> int:
    """Bytes from one page of ``page_entries`` tokens to the next: whole multiples of 576."""
    return -(-page_entries * TOKEN_BYTES // DATA_BYTES) * DATA_BYTES
