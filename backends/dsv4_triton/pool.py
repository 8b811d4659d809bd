"""A pool of packed pages: the bytes, and the strided view that attention kernels address."""

from __future__ import annotations

import torch

from dsv4_triton.geometry import TOKEN_BYTES, page_stride


class PackedPool:
    """``num_pages`` pages of ``page_entries`` tokens in one zeroed uint8 buffer ``[num_pages, stride]``.

    Slot ``s`` is entry ``s % page_entries`` of page ``s // page_entries``. Page 0 is the dummy page.

    Attributes:
        buffer: uint8 ``[num_pages, page_stride(page_entries)]``, all bytes of the pool.
        page_entries: tokens a page.
    """

    def __init__(self, num_pages: int, page_entries: int, device: torch.device | str) -> None:
        if num_pages < 1 or page_entries < 1:
            raise ValueError(
                f"PackedPool: num_pages and page_entries must be at least 1, got {num_pages} and {page_entries}"
            )
        self.page_entries = page_entries
        self.buffer = torch.zeros(num_pages, page_stride(page_entries), dtype=torch.uint8, device=device)

    @property
    def num_pages(self) -> int:
        return self.buffer.shape[0]

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self.num_pages * self.page_entries

    def view(self) -> torch.Tensor:
        """uint8 ``[num_pages, page_entries, 1, 584]`` over the buffer, page stride kept.

        The last dimension tags the format for a kernel; inside a page the layout is that of ``geometry``.
        """
        packed = self.buffer[:, : self.page_entries * TOKEN_BYTES]
        return packed.unflatten(1, (self.page_entries, 1, TOKEN_BYTES))
