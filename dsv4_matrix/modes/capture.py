"""A captured step, whatever captures it: a CUDA graph where there is a GPU, a recorded tape where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from dsv4_matrix.modes.host_sync import ReadWatch
from dsv4_matrix.modes.recorder import RecordedStep

Outputs = tuple[tuple[Tensor, Tensor], ...]


class CapturedStep(Protocol):
    """``outputs`` are ``(out, lse)`` of each forward inside the graph, in static memory.

    ``syncs`` are host syncs that the step made and hid while it was captured.
    """

    outputs: Outputs
    syncs: tuple[str, ...]

    @property
    def recorded(self) -> int:
        """What the graph holds; 0 means that nothing was captured."""
        ...

    def replay(self) -> None: ...


class CudaGraphStep:
    """``torch.cuda.graph`` around the step. HostSyncError at a host sync inside the step.

    torch refuses most syncs before CUDA hears of them, so a capture survives one that the backend swallows, with
    whatever the backend took instead frozen into the graph: such syncs are watched for as on a CPU.
    """

    def __init__(self, step: Callable[[], Outputs]) -> None:
        watch = ReadWatch()
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(self._graph), watch:
                self.outputs = step()
        except BaseException:
            # A capture that a host sync broke cannot be ended, and then torch leaves its stream current.
            torch.cuda.set_stream(stream)
            raise
        self.syncs: tuple[str, ...] = tuple(watch.syncs)

    @property
    def recorded(self) -> int:
        # Outputs are NaN before each replay, so that an empty graph cannot pass: that the capture ended is enough.
        return 1

    def replay(self) -> None:
        self._graph.replay()


def capture(step: Callable[[], Outputs], *, after_warmup: Callable[[], None], device: str) -> CapturedStep:
    """Run ``step`` once to warm up, on a GPU on a side stream; call ``after_warmup``; capture ``step``."""
    if torch.device(device).type != "cuda":
        step()
        after_warmup()
        return RecordedStep(step)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    after_warmup()
    return CudaGraphStep(step)
