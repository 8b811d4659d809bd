"""Measuring: each shape by the kernel, and by the peer beside it where it is installed; each told as it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dsv4_matrix.bench.floors import moved_bytes, operations
from dsv4_matrix.bench.inputs import build_inputs
from dsv4_matrix.bench.kernels import Kernel
from dsv4_matrix.bench.results import Ceilings, Measurement
from dsv4_matrix.bench.shapes import Shape
from dsv4_matrix.bench.timing import captured, median_microseconds, replays


def measure(
    shapes: Sequence[Shape],
    kernel: Kernel,
    peer: Kernel | None,
    table: dict[Shape, float],
    ceilings: Ceilings,
    device: torch.device,
    tell: Callable[[Measurement], None],
) -> None:
    """Measure shapes one after the other; ``tell`` hears of each as it is done."""
    for shape in shapes:
        inputs = build_inputs(shape, device)
        graphs = [captured(kernel.call(inputs))]
        if peer is not None:
            graphs.append(captured(peer.call(inputs)))
        samples = replays(graphs)
        ordered = sorted(samples[0])
        tenth = len(ordered) // 10
        result = Measurement(
            shape,
            median_microseconds(ordered),
            ordered[tenth],
            ordered[-1 - tenth],
            ceilings.memory_microseconds(moved_bytes(shape)),
            ceilings.matrix_microseconds(operations(shape)),
            table.get(shape),
            median_microseconds(samples[1]) if peer is not None else None,
            kernel.described(inputs),
        )
        del inputs, graphs  # gigabytes, which the next shape needs
        tell(result)
