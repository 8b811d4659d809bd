"""The packed page format as this backend reads and writes it, stated here on purpose and compared elsewhere.

Layout of one page of ``P`` tokens (FlashMLA's 584-byte format; data first, scales after all data)::

    byte t*576 .. t*576+447         448 e4m3 values of token t, in seven groups of 64
    byte t*576+448 .. t*576+575     64 bf16 rope values of token t
    byte P*576 + t*8 + g            scale byte of group g = 0..6: the group's factor is 2 ** (byte - 127), 255 is NaN
    byte P*576 + t*8 + 7            pad, belongs to nobody
    byte P*584 ..                   page tail up to the page stride, belongs to nobody
"""

from __future__ import annotations

HEAD_DIM = 512
NOPE_DIM = 448
ROPE_DIM = 64
GROUP = 64
DATA_BYTES = NOPE_DIM + 2 * ROPE_DIM
SCALE_BYTES = 8
TOKEN_BYTES = DATA_BYTES + SCALE_BYTES

PAGE_SIZE = 256
WINDOW = 128
COMPRESS_RATIOS = (0, 4, 128)
NUM_HEADS = (16, 32, 64, 128)
SWA_PAGE_SIZES = (256, 128)

#: smallest amax that a group's scale is formed from: keeps the factor of an all-zero group finite and exact
AMAX_FLOOR = 1e-4


def page_stride(page_entries: int) -> int:
    """Bytes from one page to the next in our own pools: ``page_entries * 584`` rounded up to a multiple of 576."""
    return -(-page_entries * TOKEN_BYTES // DATA_BYTES) * DATA_BYTES
