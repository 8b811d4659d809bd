"""The oracle of DeepSeek-V4 sparse attention: visibility, number format and softmax, each from first principles.

It never sees a slot, a page table, packed bytes or a backend's metadata, and imports nothing but numpy and torch. The
module itself satisfies ``dsv4_matrix.protocol.Reference``.
"""

from __future__ import annotations

from dsv4_reference.attention import attend, attend_low_precision
from dsv4_reference.codec import dequantise, quantise, quantise_dequantise
from dsv4_reference.pages import pack_page, unpack_page
from dsv4_reference.visibility import visible

__all__ = [
    "attend",
    "attend_low_precision",
    "dequantise",
    "pack_page",
    "quantise",
    "quantise_dequantise",
    "unpack_page",
    "visible",
]
