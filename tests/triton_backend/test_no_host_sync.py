"""Lengths that only the device knows: no step reads a tensor from the host, eager, prepared or captured."""

from __future__ import annotations

import pytest
import torch

from dsv4_matrix.modes.errors import HostSyncError
from dsv4_matrix.modes.host_sync import no_host_sync

MODES = {
    "decode": ([127, 255], [1, 1]),
    "extend": ([100, 250], [3, 8]),
    "target_verify": ([126, 254], [3, 3]),
    "draft_extend": ([64, 96], [1, 4]),
}


@pytest.fixture
def step(make_world, backend_class, draw, device):
    """A backend, a batch without host lengths, and the rest of its step."""

    def make(mode, *, uniform=False, **settings):
        world = make_world([300, 300], **settings)
        prefixes, counts = MODES[mode]
        if uniform:
            counts = [counts[-1]] * 2
        batch, rows = world.batch(mode, prefixes, counts, on_host=False)
        backend = backend_class(world.runner)
        count = len(rows.position)
        q, k, sink = draw(count, 16, 512), draw(count, 512), draw(16, dtype=torch.float32)
        raw = torch.zeros(count, 512, dtype=torch.int32, device=device)

        def run():
            backend.store_kv(batch, k)
            if mode == "draft_extend":
                return [backend.forward(q, batch, 0, sink)]
            for ratio in (4, 128):
                backend.store_compressed(batch, ratio, k)
            backend.write_c4_selection(raw)
            return [backend.forward(q, batch, ratio, sink) for ratio in (0, 4, 128)]

        return backend, batch, run

    return make


@pytest.mark.parametrize(("mode", "path"), [*((mode, "dense") for mode in MODES), ("extend", "sparse")])
def test_an_eager_step(step, device, mode, path):
    backend, batch, run = step(mode, prefill_path=path)
    with no_host_sync(device):
        backend.init_forward_metadata(batch)
        answers = run()
    assert len(answers) == (1 if mode == "draft_extend" else 3)


@pytest.mark.parametrize("mode", ["decode", "target_verify", "draft_extend"])
def test_a_capture_and_its_replays(step, device, mode):
    backend, batch, _ = step(mode, uniform=True)
    rows = batch.out_cache_loc.shape[0]
    backend.init_cuda_graph_state(2, rows)
    with no_host_sync(device):
        for in_capture in (True, False, False):
            backend.init_forward_metadata_out_graph(batch, in_capture=in_capture)
            backend.init_forward_metadata_in_graph(batch)
    assert backend.core_metadata("test").rows == rows


def test_draft_steps(make_world, backend_class, device):
    world = make_world([300, 300])
    multi = backend_class.multi_step(world.runner, num_steps=4)
    batch, _ = world.batch("decode", [60, 126], on_host=False)
    batch.out_cache_loc = torch.arange(300, 308, device=device)
    multi.init_cuda_graph_state(2, 8)
    with no_host_sync(device):
        multi.init_forward_metadata(batch)
        for in_capture in (True, False):
            multi.init_forward_metadata_out_graph(batch, in_capture=in_capture)
            multi.init_forward_metadata_in_graph(batch)


def test_rows_padded_later(make_world, backend_class, draw, device):
    world = make_world([300, 300])
    batch, _ = world.batch("decode", [60, 126], on_host=False)
    backend = backend_class(world.runner)
    backend.init_forward_metadata(batch)
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, batch.out_cache_loc.new_zeros(1)])
    k = draw(3, 512)
    with no_host_sync(device):
        backend.store_kv(batch, k)
        backend.store_compressed(batch, 4, k)


def test_a_sync_is_noticed(device):
    with pytest.raises((HostSyncError, RuntimeError)), no_host_sync(device):
        torch.ones(1, device=device).item()
