"""What a step's metadata costs a device: launches, counted, since on short steps they are what time is made of."""

from __future__ import annotations

import pytest
import torch
from dsv4_triton import attention, metadata_kernels, store
from dsv4_triton.choice import Choice
from torch.utils._python_dispatch import TorchDispatchMode


class Work(TorchDispatchMode):
    """Names of operators that do something on a device: views and allocations do not."""

    FREE = frozenset({
        "alias", "as_strided", "detach", "expand", "permute", "select", "slice", "squeeze", "transpose", "unsqueeze",
        "view", "empty", "empty_like", "empty_strided", "new_empty",
    })  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in self.FREE:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def work(monkeypatch):
    """Operators and kernel launches from here on; kernels are counted instead of run."""
    counted = Work()

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid):
            return lambda *_, **__: counted.seen.append(self.name)

    kernels = {metadata_kernels: ("_metadata_kernel", "_c4_selection_kernel"), store: ("_pack_and_store",),
               attention: ("attend", "combine")}  # fmt: skip
    for module, names in kernels.items():
        for name in names:
            monkeypatch.setattr(module, name, Kernel(name))
    return counted


MODES = [("decode", [1, 1]), ("target_verify", [3, 3]), ("draft_extend", [4, 4])]


@pytest.mark.parametrize(("mode", "counts"), [*MODES, ("extend", [3, 9])])
def test_eager_metadata_is_one_launch(make_world, backend_class, work, mode, counts):
    world = make_world([300, 300])
    batch, _ = world.batch(mode, [126, 254], counts)
    backend = backend_class(world.runner)
    with work:
        backend.init_forward_metadata(batch)
    # EXTEND also clears the raw selection of the sparse path
    assert work.seen == (["full_like"] if mode == "extend" else []) + ["_metadata_kernel"]


@pytest.mark.parametrize(("mode", "counts"), MODES)
def test_the_captured_part_is_one_launch(make_world, backend_class, work, mode, counts):
    world = make_world([300, 300])
    batch, _ = world.batch(mode, [126, 254], counts)
    backend = backend_class(world.runner)
    backend.init_cuda_graph_state(2, sum(counts))
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    with work:
        backend.init_forward_metadata_in_graph(batch)
    assert work.seen == ["_metadata_kernel"]


@pytest.mark.parametrize(("mode", "counts"), MODES)
def test_preparing_a_replay_is_three_copies(make_world, backend_class, work, mode, counts):
    world = make_world([300, 300])
    batch, _ = world.batch(mode, [126, 254], counts)
    backend = backend_class(world.runner)
    backend.init_cuda_graph_state(2, sum(counts))
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    with work:
        backend.init_forward_metadata_out_graph(batch)
    assert work.seen == ["copy_"] * 3


def test_the_captured_part_of_a_draft_is_one_launch_a_step(make_world, backend_class, work, device):
    world = make_world([300, 300])
    multi = backend_class.multi_step(world.runner, num_steps=4)
    batch, _ = world.batch("decode", [60, 126])
    batch.out_cache_loc = torch.arange(300, 308, device=device)
    multi.init_cuda_graph_state(2, 2)
    multi.init_forward_metadata_out_graph(batch, in_capture=True)
    with work:
        multi.init_forward_metadata_in_graph(batch)
    assert work.seen == ["_metadata_kernel"] * 3


def test_the_selection_is_one_launch(make_world, backend_class, work, device):
    world = make_world([300, 300])
    batch, _ = world.batch("decode", [126, 254])
    backend = backend_class(world.runner)
    backend.init_forward_metadata(batch)
    work.seen.clear()
    raw = torch.zeros(2, 512, dtype=torch.int32, device=device)
    with work:
        backend.write_c4_selection(raw)
    assert work.seen == ["_c4_selection_kernel"]


@pytest.mark.parametrize(
    ("ratio", "between"), [(0, []), (4, ["_pack_and_store", "_c4_selection_kernel"]), (128, ["_pack_and_store"])]
)
def test_a_captured_step_launches_its_kernels_and_nothing_else(
    make_world, backend_class, work, device, monkeypatch, ratio, between
):
    """No copy, no fill, no operator between them: what a step costs beside its kernels is the gaps."""
    monkeypatch.setattr(attention, "choose", lambda *_: Choice("portable", "whichever serves, it is one launch"))
    world = make_world([300, 300])
    batch, _ = world.batch("decode", [126, 254])
    backend = backend_class(world.runner)
    backend.init_cuda_graph_state(2, 2)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    q = torch.zeros(2, world.runner.num_heads, 512, dtype=torch.bfloat16, device=device)
    k = torch.zeros(2, 512, dtype=torch.bfloat16, device=device)
    raw = torch.zeros(2, world.runner.index_topk, dtype=torch.int32, device=device)
    sink = torch.zeros(world.runner.num_heads, device=device)
    with work:
        backend.init_forward_metadata_in_graph(batch)
        backend.store_kv(batch, k)
        if ratio:
            backend.store_compressed(batch, ratio, k)
        if ratio == 4:
            backend.write_c4_selection(raw)
        backend.forward(q, batch, ratio, sink)
    assert work.seen == ["_metadata_kernel", "_pack_and_store", *between, "attend"]


def test_the_count_notices_an_operator(work, device):
    values = torch.zeros(3, device=device)
    with work:
        values[:2].add_(1)
    assert work.seen == ["add_"]
