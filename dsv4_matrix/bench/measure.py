"""Measuring: each shape by the kernel, and by the peer beside it where it is installed; results as plain values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dsv4_matrix.bench.floors import Ceilings, moved_bytes, operations
from dsv4_matrix.bench.inputs import build_inputs
from dsv4_matrix.bench.kernels import Kernel
from dsv4_matrix.bench.shapes import Shape
from dsv4_matrix.bench.timing import captured, median_microseconds, replays


@dataclass(frozen=True)
class Measurement:
    """One shape, in microseconds.

    Attributes:
        median, low, high: of the replays; low and high are their second and last but one deciles.
        memory_floor, matrix_floor: from this device's own ceilings.
        table: the peer's median from its table; None where the table has no such shape or is of another GPU.
        beside: the peer's median in this process; None where it is not installed.
        choice: which of its kernels the function took, in its own words; empty where it has one only.
    """

    shape: Shape
    median: float
    low: float
    high: float
    memory_floor: float
    matrix_floor: float
    table: float | None
    beside: float | None
    choice: str = ""

    @property
    def ratio(self) -> float | None:
        """The peer's time over ours, side by side if both ran here, else from the table."""
        peer = self.table if self.beside is None else self.beside
        return None if peer is None else peer / self.median


@dataclass(frozen=True)
class Summary:
    """Geometric mean of the ratios, and the shape with the smallest."""

    mean: float
    worst: Measurement


def measure(
    shapes: Sequence[Shape],
    kernel: Kernel,
    peer: Kernel | None,
    table: dict[Shape, float],
    ceilings: Ceilings,
    device: torch.device,
    tell: Callable[[Measurement], None],
) -> list[Measurement]:
    """Measure shapes one after the other; ``tell`` hears of each as it is done."""
    results = []
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
        tell(result)
        results.append(result)
        del inputs, graphs
    return results


def summarise(results: Sequence[Measurement]) -> Summary | None:
    """None where no shape has a peer's time."""
    compared = [(result.ratio, result) for result in results if result.ratio is not None]
    if not compared:
        return None
    mean = math.exp(statistics.fmean(math.log(ratio) for ratio, _ in compared))
    return Summary(mean, min(compared, key=lambda pair: pair[0])[1])
