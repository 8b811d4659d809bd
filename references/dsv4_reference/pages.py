"""Packed pages byte by byte in numpy: an independent reading of the layout, for tests of pools and kernels.

A page of P tokens (not interleaved; FlashMLA and SGLang's DeepSeek-V4 pool):

    t * 576            448 e4m3 codes of token t, then 64 bf16 rope values, little endian
    P * 576 + t * 8    7 scale bytes of token t, then one byte that is never written
    P * 584            tail up to the next multiple of 576, never written

The oracle itself never looks at a page.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dsv4_reference.codec import dequantise, quantise
from dsv4_reference.geometry import DATA_BYTES, GROUPS, HEAD_DIM, NOPE, SCALE_BYTES, page_stride

Bytes = npt.NDArray[np.uint8]


def pack_page(k: Tensor, page_entries: int, onto: Bytes | None = None) -> Bytes:
    """One page that holds ``k`` in its first rows.

    Args:
        k: bf16 ``[n, 512]``, n <= page_entries.
        page_entries: tokens a page (256 or 128 for SWA, 64 for C4, 2 for C128; any positive number).
        onto: uint8 ``[stride]`` whose other bytes are kept; zeros if None.

    Returns:
        uint8 ``[stride]``, a new array. ValueError if ``k`` or ``onto`` does not fit.
    """
    if k.dtype != torch.bfloat16 or k.dim() != 2 or k.shape[1] != HEAD_DIM or k.shape[0] > page_entries:
        raise ValueError(
            f"dsv4_reference.pack_page: k must be bf16 [n <= {page_entries}, {HEAD_DIM}], "
            f"got {k.dtype} {tuple(k.shape)}"
        )
    page = np.zeros(page_stride(page_entries), np.uint8) if onto is None else onto.copy()
    data, scales = _areas(page, page_entries)
    codes, scale_bytes = quantise(k.cpu())
    rope = k[:, NOPE:].cpu().contiguous().view(torch.int16).numpy().astype("<i2").view(np.uint8)
    rows = k.shape[0]
    data[:rows, :NOPE] = codes.numpy()
    data[:rows, NOPE:] = rope.reshape(rows, -1)
    scales[:rows, :GROUPS] = scale_bytes.numpy()
    return page


def unpack_page(page: Bytes, page_entries: int) -> npt.NDArray[np.float64]:
    """fp64 ``[page_entries, 512]`` of a page's bytes, uint8 ``[stride]``, whatever they are; values exact."""
    data, scales = _areas(page, page_entries)
    codes = torch.from_numpy(data[:, :NOPE].copy())
    nope = dequantise(codes, torch.from_numpy(scales[:, :GROUPS].copy())).numpy()
    high_halves = data[:, NOPE:].copy().view("<u2").astype(np.uint32) << 16  # a bf16 is the high half of an fp32
    return np.concatenate([nope, high_halves.view(np.float32).astype(np.float64)], axis=1)


def _areas(page: Bytes, page_entries: int) -> tuple[Bytes, Bytes]:
    """Views of the data area ``[P, 576]`` and the scale area ``[P, 8]``."""
    if page.dtype != np.uint8 or page.shape != (page_stride(page_entries),):
        raise ValueError(
            f"dsv4_reference: a page of {page_entries} tokens is uint8 [{page_stride(page_entries)}], "
            f"got {page.dtype} {page.shape}"
        )
    split = page_entries * DATA_BYTES
    scales = page[split : split + page_entries * SCALE_BYTES]
    return page[:split].reshape(page_entries, DATA_BYTES), scales.reshape(page_entries, SCALE_BYTES)
