"""The recorded replay keeps the contract of a CUDA graph: addresses and values frozen, work done again."""

import pytest
import torch
import triton
import triton.language as tl

from dsv4_matrix.modes.errors import HostSyncError
from dsv4_matrix.modes.host_sync import ReadWatch, no_host_sync
from dsv4_matrix.modes.recorder import RecordedStep

INTERPRETED = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="launches on CPU tensors need Triton's interpreter"
)


@triton.jit
def _add_kernel(source, target, amount, count, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count) + amount, mask=at < count)


def record(step):
    """Record a step of one tensor; its second output is of no interest."""
    return RecordedStep(lambda: ((step(), torch.zeros(1)),))


def test_operators_run_again_on_the_tensors_they_were_recorded_with():
    static = torch.arange(4.0)
    graph = record(lambda: (static * 2).cumsum(0)[1:] + static[:3])
    static.copy_(torch.tensor([1.0, 5.0, 2.0, 0.0]))
    graph.replay()
    assert graph.outputs[0][0].tolist() == [13.0, 21.0, 18.0]


def test_a_replaced_tensor_is_not_seen():
    state = {"lens": torch.tensor([1])}
    graph = record(lambda: state["lens"] * 10)
    state["lens"] = torch.tensor([7])
    graph.replay()
    assert graph.outputs[0][0].tolist() == [10]


def test_python_numbers_are_frozen():
    state = {"count": 2}
    static = torch.ones(3)
    graph = record(lambda: static * state["count"])
    state["count"] = 5
    graph.replay()
    assert graph.outputs[0][0].tolist() == [2.0, 2.0, 2.0]


def test_in_place_operators_and_views_reach_the_same_memory():
    static, buffer = torch.ones(4), torch.zeros(2, 2)

    def step():
        buffer.view(-1)[1:3].add_(static[:2])
        buffer.t()[0].copy_(static[2:])
        return buffer.clone()

    graph = record(step)
    buffer.zero_()
    static.fill_(3)
    graph.replay()
    assert graph.outputs[0][0].tolist() == [[3.0, 3.0], [3.0, 0.0]]


@INTERPRETED
@pytest.mark.parametrize("grid", ["fixed", "computed"])
def test_kernel_launches_run_again_with_frozen_scalars_and_grid(grid):
    source, target = torch.zeros(8), torch.zeros(8)
    state = {"amount": 1.0, "programs": 2}

    def step():
        launch = (state["programs"],) if grid == "fixed" else lambda meta: (state["programs"],)
        _add_kernel[launch](source, target, state["amount"], 8, BLOCK=4)
        return target + 0

    graph = record(step)
    state.update(amount=100.0, programs=1)
    source.fill_(10)
    target.zero_()
    graph.replay()
    assert graph.outputs[0][0].tolist() == [11.0] * 8


def test_fresh_memory_is_poison_before_each_replay():
    static = torch.ones(2)

    def step():
        fresh = torch.empty(4)
        fresh[:2] = static
        return fresh

    graph = record(step)
    for _ in range(2):
        graph.outputs[0][0].zero_()
        graph.replay()
        assert graph.outputs[0][0][:2].tolist() == [1.0, 1.0]
        assert graph.outputs[0][0][2:].isnan().all()


SYNCS = {
    "item": lambda t: t.sum().item(),
    "tolist": lambda t: t.tolist(),
    "cpu": lambda t: t.cpu(),
    "numpy": lambda t: t.numpy(),
    "to-cpu": lambda t: t.to("cpu"),
    "to-device-cpu": lambda t: t.to(device=torch.device("cpu"), dtype=torch.int32),
    "int": lambda t: int(t[0]),
    "bool": lambda t: bool(t.any()),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 1],
    "repeat-interleave": lambda t: torch.repeat_interleave(t),
    "unique": lambda t: torch.unique(t),
    "equal": lambda t: torch.equal(t, t),
    "mask-assignment": lambda t: t.index_put_((t > 1,), t[:2]),
}


@pytest.mark.parametrize("read", SYNCS.values(), ids=SYNCS)
def test_host_syncs_raise_where_they_are_made(read):
    static = torch.arange(4)
    with pytest.raises(HostSyncError, match=r"host sync: .* at .*test_recorder\.py:\d+"):
        record(lambda: read(static) and static)
    with pytest.raises(HostSyncError), no_host_sync("cpu"):
        read(static)
    # Nothing stays patched.
    assert static.tolist() == [0, 1, 2, 3]
    assert static.to("cpu") is static


@pytest.mark.parametrize("name", ["item", "tolist", "cpu", "numpy", "to-cpu", "to-device-cpu", "int", "bool"])
def test_a_watch_without_operators_sees_python_reading_a_tensor(name):
    """What stands beside CUDA's own checks during a capture; a swallowed one is remembered."""
    static = torch.arange(4)
    with ReadWatch() as watch:
        with pytest.raises(HostSyncError, match=r"host sync: Tensor\.\w+\(.*\) at .*test_recorder\.py:\d+"):
            SYNCS[name](static)
        static.add_(0)  # device work is not reading
    assert len(watch.syncs) == 1
    assert static.tolist() == [0, 1, 2, 3]


def test_a_swallowed_sync_is_remembered():
    static = torch.arange(4)

    def step():
        try:
            static.tolist()
        except HostSyncError:
            return static + 1
        return static

    assert "Tensor.tolist()" in record(step).syncs[0]


def test_what_waits_for_nothing_is_allowed():
    static = torch.arange(4)
    lens = torch.tensor([1, 2, 0, 1])

    def step():
        spread = torch.repeat_interleave(static, lens, output_size=4)
        static.masked_fill_(static > 2, 2)
        return spread.to(torch.int32)[static]

    assert record(step).recorded > 3


@INTERPRETED
def test_a_kernel_inside_a_watch_may_read_the_host():
    source, target = torch.zeros(4), torch.zeros(4)
    with no_host_sync("cpu"):
        _add_kernel[(1,)](source, target, 2.0, 4, BLOCK=4)
    assert target.tolist() == [2.0] * 4


def test_a_step_without_operators_is_known_as_empty():
    static = torch.ones(1)
    assert RecordedStep(lambda: ((static, static),)).recorded == 0
