"""What work puts on the device, counted in its graph, and how long the kernels of a graph take by themselves."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

#: replays that are profiled
PROFILED = 10


class LaunchError(RuntimeError):
    """The driver or the profiler does not say what was asked."""


def graph_launches(work: Callable[[], object]) -> int:
    """Kernels, copies and fills of ``work``, each a node of its graph: exact, and nothing is timed or traced."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        work()
    count = ctypes.c_size_t()
    name = "libamdhip64.so" if torch.version.hip else "libcuda.so.1"
    driver = ctypes.CDLL(name)
    nodes = driver.hipGraphGetNodes if torch.version.hip else driver.cuGraphGetNodes
    status = nodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
    if status:
        raise LaunchError(f"{name}: the nodes of a captured graph cannot be counted, error {status}")
    return count.value


def kernel_microseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Sum of the durations of a graph's kernels, copies and fills, without the gaps between them: mean of 10 replays.

    Raises LaunchError where the profiler sees none.
    """
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        for _ in range(PROFILED):
            graph.replay()
        torch.cuda.synchronize()
    ran = [event for event in record.events() or [] if str(event.device_type).endswith("CUDA")]
    spent = sum(event.time_range.elapsed_us() for event in ran)
    if not spent:
        raise LaunchError("torch.profiler saw no kernel of a graph's replays; is CUPTI missing?")
    return float(spent) / PROFILED
