"""Two times that no kernel beats by much: the fewest bytes over the copy bandwidth, the products over the matrix rate.

Both ceilings are measured on the device at hand, never taken from a datasheet.
"""

from __future__ import annotations

from functools import partial

import torch

from dsv4_matrix.bench.results import Ceilings
from dsv4_matrix.bench.shapes import Shape
from dsv4_matrix.bench.timing import median_microseconds, sample

HEAD_DIM = 512
TOKEN_BYTES = 584
BF16_BYTES = 2
#: 4 GiB read and written, and a product of 8192 on each side: both far above what a launch costs
COPY_BYTES = 2 * 1024**3
MATRIX_SIDE = 8192


def moved_bytes(shape: Shape) -> int:
    """Bytes that must move: every selected key of every row once, q in and out back."""
    return shape.rows * (shape.keys * TOKEN_BYTES + 2 * shape.heads * HEAD_DIM * BF16_BYTES)


def operations(shape: Shape) -> int:
    """Two products (q . k and p . v, both 512 wide) a head and key, two operations a multiply-add."""
    return 2 * shape.rows * shape.keys * shape.heads * 2 * HEAD_DIM


def measure_ceilings(device: torch.device) -> Ceilings:
    """Copy bandwidth and bf16 matrix rate of ``device``."""
    source = torch.zeros(COPY_BYTES // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    # A graph hands copies to the copy engines, which need not be the fastest; an elementwise kernel moves as much.
    ways = (partial(target.copy_, source), partial(torch.bitwise_not, source, out=target))
    copied = min(median_microseconds(sample(way, repeats=10)) for way in ways)
    a = torch.randn(MATRIX_SIDE, MATRIX_SIDE, device=device, dtype=torch.bfloat16)
    b = torch.randn(MATRIX_SIDE, MATRIX_SIDE, device=device, dtype=torch.bfloat16)
    multiplied = median_microseconds(sample(partial(torch.mm, a, b), repeats=10))
    return Ceilings(2 * COPY_BYTES / copied * 1e6, 2 * MATRIX_SIDE**3 / multiplied * 1e6)
