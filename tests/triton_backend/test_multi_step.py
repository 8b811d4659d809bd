"""Draft steps: each a decode at prefix + s with its own slots, over shared pools, eager and captured."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch


def flat_batch(world, prefixes, num_steps, *, on_host=True):
    """The draft worker's batch: committed lengths, and the locations of all steps, request-major."""
    batch, _ = world.batch("decode", prefixes, on_host=on_host)
    bs = len(prefixes)
    position = np.asarray(prefixes, np.int64).reshape(bs, 1) + np.arange(num_steps)
    batch.seq_lens = world.int64(list(prefixes))
    batch.seq_lens_cpu = list(prefixes) if on_host else None
    batch.positions = batch.seq_lens.clone()
    batch.out_cache_loc = world.int64(world.table[np.arange(bs)[:, None], position].reshape(-1))
    return batch


def addresses(core):
    """Of every tensor of a step's metadata, by field."""
    tensors = {field.name: getattr(core, field.name) for field in fields(core)}
    return {name: value.data_ptr() for name, value in tensors.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("num_steps", [2, 3, 4, 5])
def test_every_step_is_a_decode_of_its_own(make_world, backend_class, check_fields, num_steps, on_host):
    world = make_world([300, 300, 300])
    multi = backend_class.multi_step(world.runner, num_steps=num_steps)
    assert len(multi.attn_backends) == num_steps - 1
    prefixes = [126, 253, 1]
    batch = flat_batch(world, prefixes, num_steps, on_host=on_host)
    multi.init_forward_metadata(batch)
    for step, backend in enumerate(multi.attn_backends):
        own, rows = world.batch("decode", [prefix + step for prefix in prefixes], on_host=on_host)
        sliced = multi.step_batch(batch, step)
        assert sliced.out_cache_loc.tolist() == rows.loc.tolist()
        assert sliced.positions.tolist() == rows.position.tolist()
        assert sliced.seq_lens.tolist() == own.seq_lens.tolist()
        assert (sliced.seq_lens_cpu is None) == (not on_host)
        core = backend.forward_metadata.core_attn_metadata
        pages = core.page_table.shape[1]
        assert pages == (-(-(254 + step) // 256) if on_host else 2)
        check_fields(core, world, rows, pages=pages)
    assert batch.seq_lens.tolist() == prefixes, "the caller's batch is left as it was"


def test_a_step_sees_the_keys_of_earlier_steps(make_world, backend_class, draw):
    """The newest key of step s is the one that step s wrote, and step s + 1 has it one further back."""
    world = make_world([300, 300])
    multi = backend_class.multi_step(world.runner, num_steps=4)
    batch = flat_batch(world, [60, 200], 4)
    multi.init_forward_metadata(batch)
    cores = [backend.forward_metadata.core_attn_metadata for backend in multi.attn_backends]
    for step, core in enumerate(cores):
        assert torch.equal(core.swa_page_indices[:, 0], core.swa_out_cache_loc)
        for earlier in range(step):
            assert torch.equal(core.swa_page_indices[:, step - earlier], cores[earlier].swa_out_cache_loc)


def test_pools_are_shared(make_world, backend_class):
    multi = backend_class.multi_step(make_world([300]).runner, num_steps=5)
    first, *later = multi.attn_backends
    for backend in later:
        for name, buffer in backend.kv_buffers().items():
            assert buffer.data_ptr() == first.kv_buffers()[name].data_ptr()


def test_steps_are_of_the_class_that_was_asked(make_world, backend_class):
    class Own(backend_class):
        pass

    multi = Own.multi_step(make_world([300]).runner, num_steps=3)
    assert [type(backend) for backend in multi.attn_backends] == [Own, Own]


def test_locations_of_another_length_are_refused(make_world, backend_class):
    world = make_world([300, 300])
    multi = backend_class.multi_step(world.runner, num_steps=3)
    batch = flat_batch(world, [60, 200], 3)
    multi.init_forward_metadata(batch)
    kept = [backend.forward_metadata for backend in multi.attn_backends]
    for wrong in (batch.out_cache_loc[:4], batch.out_cache_loc[:2], batch.out_cache_loc.repeat(2)):
        bad = replace(batch, out_cache_loc=wrong)
        for call in (multi.init_forward_metadata, lambda b: multi.step_batch(b, 0)):
            with pytest.raises(AssertionError, match=rf"out_cache_loc of {len(wrong)} for 2 requests; supported.*6"):
                call(bad)
    assert [backend.forward_metadata for backend in multi.attn_backends] == kept


@pytest.mark.parametrize("step", [-1, 2, 3])
def test_the_last_step_does_not_attend(make_world, backend_class, step):
    world = make_world([300])
    multi = backend_class.multi_step(world.runner, num_steps=3)
    with pytest.raises(IndexError, match=f"step {step}; 3 steps attend in 0 to 1"):
        multi.step_batch(flat_batch(world, [60], 3), step)


def test_replays_move_every_step_in_place(make_world, backend_class, check_fields):
    world = make_world([300] * 4)
    multi = backend_class.multi_step(world.runner, num_steps=3)
    multi.init_cuda_graph_state(4, 12)
    largest = flat_batch(world, [1] * 4, 3)
    multi.init_forward_metadata_out_graph(largest, in_capture=True)
    multi.init_forward_metadata_in_graph(largest)
    multi.on_after_cuda_graph_warmup()
    multi.init_forward_metadata_in_graph(largest)
    kept = [backend.forward_metadata for backend in multi.attn_backends]
    where = [addresses(step.core_attn_metadata) for step in kept]
    assert not set(where[0].values()) & set(where[1].values()), "steps of one graph must not share what the graph fills"
    for prefixes in ([126, 253, 1, 200], [64, 96], [], [3], [255, 127, 126]):
        batch = flat_batch(world, prefixes, 3)
        multi.init_forward_metadata_out_graph(batch)
        multi.init_forward_metadata_in_graph(batch)
        for step, backend in enumerate(multi.attn_backends):
            _, rows = world.batch("decode", [prefix + step for prefix in prefixes])
            assert backend.forward_metadata is kept[step]
            core = kept[step].core_attn_metadata
            assert addresses(core) == where[step]
            check_fields(core, world, rows.then(world.pad_rows(4 - len(prefixes))), pages=2)


@pytest.mark.parametrize(("mode", "actual"), [("idle", None), ("decode", "idle")])
def test_an_idle_replay_writes_nowhere_in_any_step(make_world, backend_class, mode, actual):
    world = make_world([300] * 2)
    multi = backend_class.multi_step(world.runner, num_steps=3)
    multi.init_cuda_graph_state(2, 2)
    batch = flat_batch(world, [60, 200], 3)
    multi.init_forward_metadata_out_graph(batch, in_capture=True)
    multi.init_forward_metadata_out_graph(batch)
    multi.init_forward_metadata_in_graph(batch)
    batch.forward_mode, batch.actual_forward_mode = mode, actual
    multi.init_forward_metadata_out_graph(batch)
    multi.init_forward_metadata_in_graph(batch)
    for backend in multi.attn_backends:
        core = backend.forward_metadata.core_attn_metadata
        assert core.swa_out_cache_loc.tolist() == [0, 0]
        assert core.seq_lens_casual.tolist() == [1, 1]


def test_no_request(make_world, backend_class):
    world = make_world([300])
    multi = backend_class.multi_step(world.runner, num_steps=3)
    multi.init_forward_metadata(flat_batch(world, [], 3))
    assert [backend.forward_metadata.core_attn_metadata.rows for backend in multi.attn_backends] == [0, 0]
