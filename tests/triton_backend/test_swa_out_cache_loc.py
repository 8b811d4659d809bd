"""Where a row's K is written: attention.md §7.2, cached or translated anew, never stale."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def backend(make_world, backend_class):
    """A backend whose slot map doubles every location."""
    world = make_world([10])
    world.runner.full_to_swa_index_mapping = 2 * torch.arange(10, device=world.runner.device)
    return backend_class(world.runner)


@pytest.fixture
def batch(device):
    def make(mode, locations, actual=None):
        loc = torch.tensor(locations, device=device)
        return SimpleNamespace(forward_mode=mode, actual_forward_mode=actual, out_cache_loc=loc)

    return make


@pytest.fixture
def cache_two(backend, make_world):
    """Metadata of a decode of two rows, its slots set to [6, 8]."""
    world = make_world([10, 10])
    decode, _ = world.batch("decode", [5, 6])
    backend.init_forward_metadata(decode)
    core = backend.forward_metadata.core_attn_metadata
    core.swa_out_cache_loc.copy_(torch.tensor([6, 8]))
    return core.swa_out_cache_loc


def test_translated_without_metadata(backend, batch):
    slots = backend.get_swa_out_cache_loc(batch("decode", [3, 4]))
    assert slots.dtype == torch.int32
    assert slots.tolist() == [6, 8]


def test_the_cached_object_itself(backend, batch, cache_two):
    assert backend.get_swa_out_cache_loc(batch("decode", [3, 4])) is cache_two


def test_rebound_after_padding_by_data_parallelism(backend, batch, cache_two):
    slots = backend.get_swa_out_cache_loc(batch("draft_extend", [3, 4, 0, 0]))
    assert slots.tolist() == [6, 8, 0, 0]
    assert slots.dtype == torch.int32


@pytest.mark.parametrize(("mode", "actual"), [("idle", None), ("decode", "idle"), ("idle", "idle")])
def test_an_idle_rank_never_sees_the_last_batch(backend, batch, cache_two, mode, actual):
    assert backend.get_swa_out_cache_loc(batch(mode, [0, 0], actual)).tolist() == [0, 0]


def test_locations_that_no_pool_has_go_to_the_dummy_slot(backend, batch):
    assert backend.get_swa_out_cache_loc(batch("decode", [-1, 9, 10, 2**40, -(2**40)])).tolist() == [0, 18, 0, 0, 0]


def test_a_replay_prepared_for_an_idle_rank_writes_nowhere(make_world, backend_class):
    """The captured step reads its own inputs, so the batch's leftovers do not matter."""
    world = make_world([300, 300])
    backend = backend_class(world.runner)
    static, _ = world.batch("decode", [255, 127])
    backend.init_cuda_graph_state(2, 2)
    backend.init_forward_metadata_out_graph(static, in_capture=True)
    backend.init_forward_metadata_in_graph(static)
    slots = backend.get_swa_out_cache_loc(static)
    assert slots.tolist() == [0, 0], "a capture writes nowhere"
    backend.init_forward_metadata_out_graph(static)
    backend.init_forward_metadata_in_graph(static)
    assert backend.get_swa_out_cache_loc(static).tolist() == world.mapping[static.out_cache_loc.cpu()].tolist()
    static.actual_forward_mode = "idle"
    backend.init_forward_metadata_out_graph(static)
    assert backend.get_swa_out_cache_loc(static) is not slots, "before the in-graph step the last replay's is stale"
    backend.init_forward_metadata_in_graph(static)
    again = backend.get_swa_out_cache_loc(static)
    assert again.data_ptr() == slots.data_ptr()
    assert again.tolist() == [0, 0]
