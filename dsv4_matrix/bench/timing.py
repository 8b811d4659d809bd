"""Timing on the device: CUDA graph replays between events, the L2 emptied before each, medians."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

#: written before every timed replay, several times the L2 of any GPU of today
FLUSH_BYTES = 256 * 1024**2
#: replays that are not counted
WARMUP = 3
REPEATS = 20


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """``work`` as a graph; it is run once before, so that compilation and lazy set-up stay out of it."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replays(graphs: Sequence[torch.cuda.CUDAGraph], repeats: int = REPEATS, flush: bool = True) -> list[list[float]]:
    """Microseconds of each replay of each graph; the graphs alternate, and their order turns from round to round."""
    buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda") if flush else None
    marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in graphs]
    for turn in range(WARMUP + repeats):
        order = range(len(graphs)) if turn % 2 == 0 else reversed(range(len(graphs)))
        for which in order:
            if buffer is not None:
                buffer.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graphs[which].replay()
            end.record()
            marks[which].append((start, end))
    torch.cuda.synchronize()
    return [[start.elapsed_time(end) * 1e3 for start, end in pairs[WARMUP:]] for pairs in marks]


def sample(work: Callable[[], object], repeats: int = REPEATS, flush: bool = False) -> list[float]:
    """Microseconds of each replay of one piece of work."""
    return replays([captured(work)], repeats, flush)[0]


def median_microseconds(samples: Sequence[float]) -> float:
    return statistics.median(samples)
