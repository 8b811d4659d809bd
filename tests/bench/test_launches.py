"""Launches are counted in a real graph on a GPU; without one, what a driver or profiler that says nothing leads to."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from dsv4_matrix.bench import launches
from dsv4_matrix.bench.launches import PROFILED, LaunchError, graph_launches, kernel_microseconds

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@on_gpu
def test_every_kernel_copy_and_fill_of_a_graph_is_counted():
    x, y = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
    assert graph_launches(lambda: x.add_(1)) == 1
    assert graph_launches(lambda: (x.add_(1), y.copy_(x), y.zero_(), y.mul_(2))) == 4


@on_gpu
def test_the_kernels_of_a_graph_take_time():
    x = torch.zeros(2**24, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    assert kernel_microseconds(graph) > 0


class Graph:
    """A graph that keeps count of its replays."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1

    def raw_cuda_graph(self) -> int:
        return 1


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())


def profiler(*events: tuple[str, float]):
    seen = [
        SimpleNamespace(device_type=device, time_range=SimpleNamespace(elapsed_us=lambda us=us: us))
        for device, us in events
    ]
    return lambda activities: nullcontext(SimpleNamespace(events=lambda: seen))


def test_only_what_ran_on_the_device_counts(no_cuda, monkeypatch):
    events = [("DeviceType.CPU", 900.0), ("DeviceType.CUDA", 30.0), ("DeviceType.CUDA", 20.0)]
    monkeypatch.setattr(launches, "profile", profiler(*events))
    graph = Graph()
    assert kernel_microseconds(graph) == pytest.approx(50.0 / PROFILED)
    assert graph.replays == 1 + PROFILED


def test_a_profiler_that_sees_nothing_is_an_error(no_cuda, monkeypatch):
    monkeypatch.setattr(launches, "profile", profiler(("DeviceType.CPU", 900.0)))
    with pytest.raises(LaunchError, match="saw no kernel"):
        kernel_microseconds(Graph())


@pytest.mark.parametrize("status", [0, 1])
def test_a_driver_that_refuses_to_count_is_an_error(no_cuda, monkeypatch, status):
    def nodes(graph, none, count):
        count._obj.value = 3
        return status

    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace(cuGraphGetNodes=nodes, hipGraphGetNodes=nodes))
    if status:
        with pytest.raises(LaunchError, match="cannot be counted, error 1"):
            graph_launches(lambda: None)
    else:
        assert graph_launches(lambda: None) == 3
