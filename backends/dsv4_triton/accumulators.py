"""fp32 accumulators of a forward, for whoever compares bits: rounding to bf16 hides most of what another order changes.

A row of several splits leaves them in the workspace, where ``combine`` reads them; that is where they are taken from.
A row of one split never stores them, and has none here. Slow, and for eager forwards only: lengths go to the host.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dsv4_triton.choice import load_kernels
from dsv4_triton.geometry import HEAD_DIM
from dsv4_triton.workload import PARTIAL_WORDS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dsv4_triton.runner import ForwardBatch

#: Words of a (row, split, head) that mean something: the accumulator, its maximum and its sum.
WORDS = HEAD_DIM + 2
#: Modules whose ``combine`` may serve a forward; the second is loaded where it can.
_LAUNCHERS = ("dsv4_triton.attention", "dsv4_triton.hopper.launch")


class Accumulators:
    """``forward`` with its accumulators; mixed into the backend."""

    def forward(
        self, q: Tensor, batch: ForwardBatch, compress_ratio: int, attn_sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def forward_with_accumulators(
        self, q: Tensor, batch: ForwardBatch, compress_ratio: int, attn_sink: Tensor | None
    ) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
        """``forward``, and fp32 ``[splits, H, 514]`` for each row that had several splits, None for the others.

        Of each split and head the 512 sums, not yet divided, then the maximum (base 2) and the sum of the weights.
        """
        with _recorded() as rows:
            out, lse = self.forward(q, batch, compress_ratio, attn_sink)
        return out, lse, [rows.get(row) for row in range(q.shape[0])]


@contextmanager
def _recorded() -> Iterator[dict[int, torch.Tensor]]:
    """Accumulators by row of every launch inside."""
    rows: dict[int, torch.Tensor] = {}
    load_kernels()
    modules = [sys.modules[name] for name in _LAUNCHERS if hasattr(sys.modules.get(name), "combine")]
    sound = [module.combine for module in modules]
    for module, kernel in zip(modules, sound, strict=True):
        module.combine = _Recorder(kernel, rows)
    try:
        yield rows
    finally:
        for module, kernel in zip(modules, sound, strict=True):
            module.combine = kernel


class _Recorder:
    """Stands for the kernel: copies what it is about to read, then launches it."""

    def __init__(self, kernel: Any, rows: dict[int, torch.Tensor]) -> None:
        self._kernel, self._rows = kernel, rows

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> Any:
            self._keep(grid[0], {**dict(zip(self._kernel.arg_names, arguments, strict=False)), **options})
            return self._kernel[grid](*arguments, **options)

        return launch

    def _keep(self, count: int, given: dict[str, Any]) -> None:
        """Copy the splits that each of ``count`` rows calls for; beyond them the workspace was never written."""
        heads, first, splits = given["heads"], given["first_row"], given["partial_splits"]
        words = PARTIAL_WORDS
        table = given["partial"].reshape(-1)[: count * splits * heads * words].view(count, splits, heads, words)
        for local in range(count):
            row = first + local
            own = _splits_of(given, row // given["seq"])
            if own > 1:
                self._rows[row] = table[local, :own, :, :WORDS].clone()


def _splits_of(given: dict[str, Any], batch: int) -> int:
    """Splits of a row, as ``splits.row_blocks`` counts them."""
    blocks = 0
    for bit, name in ((1, "lengths"), (2, "extra_lengths")):
        width = given["width" if bit == 1 else "extra_width"]
        length = int(given[name][batch]) if given["given"] & bit else width
        blocks += -(-min(max(length, 0), width) // given["BLOCK_N"])
    return max(1, -(-blocks // given["SPLIT_BLOCKS"]))
