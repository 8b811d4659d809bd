"""Which bytes a step writes: those of its real rows, at their slots, and no other byte of any pool."""

from __future__ import annotations

import numpy as np
import pytest
import torch

POISON = 0xA5


@pytest.fixture
def poisoned(make_world, backend_class):
    """A backend over two requests whose pools hold one poison byte everywhere."""

    def make(lengths=(300, 300), **settings):
        world = make_world(lengths, **settings)
        backend = backend_class(world.runner)
        for buffer in backend.kv_buffers().values():
            buffer.fill_(POISON)
        return world, backend

    return make


def owned(slots, pages: int, entries: int, stride: int) -> np.ndarray:
    """Bytes of packed entries: 576 of data and seven scales each."""
    mask = np.zeros((pages, stride), bool)
    for slot in slots:
        page, entry = divmod(int(slot), entries)
        mask[page, entry * 576 : (entry + 1) * 576] = True
        mask[page, entries * 576 + entry * 8 : entries * 576 + entry * 8 + 7] = True
    return mask


def check_written(backend, name: str, slots, entries: int) -> None:
    """Bytes outside ``slots`` still hold poison; those of each slot do not, but for the few that chance gives."""
    buffer = backend.kv_buffers()[name].cpu().numpy()
    mask = owned(slots, *buffer.shape[:1], entries, buffer.shape[1])
    assert (buffer[~mask] == POISON).all(), f"{name}: a byte that no row owns was written"
    for slot in slots:
        mine = buffer[owned([slot], *buffer.shape[:1], entries, buffer.shape[1])]
        assert (mine == POISON).mean() < 0.1, f"{name}: slot {slot} was not written"


def test_the_check_notices_a_stray_byte_and_a_missing_entry(poisoned, draw):
    world, backend = poisoned()
    batch, rows = world.batch("decode", [255, 127])
    backend.init_forward_metadata(batch)
    backend.store_kv(batch, draw(2, 512))
    slots = world.mapping[rows.loc]
    check_written(backend, "swa", slots, 256)
    with pytest.raises(AssertionError, match="was not written"):
        check_written(backend, "swa", [*slots, next(s for s in range(256, 600) if s not in slots)], 256)
    backend.kv_buffers()["swa"][0, 5] = 0
    with pytest.raises(AssertionError, match="no row owns"):
        check_written(backend, "swa", slots, 256)


@pytest.mark.parametrize("swa_page_size", [128, 256])
def test_a_step_writes_its_rows_and_the_entries_they_complete(poisoned, draw, swa_page_size):
    world, backend = poisoned(swa_page_size=swa_page_size)
    batch, rows = world.batch("target_verify", [126, 251], [6, 6])
    backend.init_forward_metadata(batch)
    backend.store_kv(batch, draw(12, 512))
    check_written(backend, "swa", world.mapping[rows.loc], swa_page_size)
    check_written(backend, "c4", [], 64)
    for ratio, name in ((4, "c4"), (128, "c128")):
        backend.store_compressed(batch, ratio, draw(12, 512))
        emitting = rows.loc[(rows.position + 1) % ratio == 0]
        assert len(emitting) == {4: 4, 128: 2}[ratio]
        check_written(backend, name, emitting // ratio, 256 // ratio)


def test_pad_rows_write_nothing_even_where_they_would_complete_an_entry(poisoned, draw):
    world, backend = poisoned()
    batch, rows = world.batch("decode", [127, 255, 3, 127], requests=[0, 1, 0, 0])
    batch.out_cache_loc[2:] = 0
    batch.out_cache_loc[3] = -1
    backend.init_forward_metadata(batch)
    k = draw(4, 512)
    k[2:] = float("nan")
    backend.store_kv(batch, k)
    check_written(backend, "swa", world.mapping[rows.loc[:2]], 256)
    for ratio, name in ((4, "c4"), (128, "c128")):
        backend.store_compressed(batch, ratio, k)
        check_written(backend, name, rows.loc[:2] // ratio, 256 // ratio)


def test_rows_padded_after_the_metadata_was_built(poisoned, draw):
    """Data parallelism lifts every rank to the longest: locations grow, metadata does not."""
    world, backend = poisoned()
    batch, rows = world.batch("decode", [127, 255])
    backend.init_forward_metadata(batch)
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, batch.out_cache_loc.new_zeros(3)])
    backend.store_kv(batch, draw(5, 512))
    check_written(backend, "swa", world.mapping[rows.loc], 256)
    backend.store_compressed(batch, 4, draw(5, 512))
    check_written(backend, "c4", rows.loc // 4, 64)


def test_an_idle_rank_writes_nothing_with_the_metadata_of_its_last_batch(poisoned, draw):
    world, backend = poisoned()
    batch, _ = world.batch("decode", [127, 255])
    backend.init_forward_metadata(batch)
    batch.out_cache_loc = torch.zeros_like(batch.out_cache_loc)
    batch.actual_forward_mode = "idle"
    backend.store_kv(batch, draw(2, 512))
    for ratio in (4, 128):
        backend.store_compressed(batch, ratio, draw(2, 512))
    for name, entries in (("swa", 256), ("c4", 64), ("c128", 2)):
        check_written(backend, name, [], entries)


def test_history_skips_locations_that_are_not_real(poisoned, draw):
    world, backend = poisoned()
    loc = world.table[0, :300].astype(np.int64)
    given = world.int64([loc[10], -1, 0, loc[11], -1, 2**40])
    rows = draw(6, 512)
    rows[[1, 2, 4]] = float("nan")
    backend.set_key_buffer(given, rows)
    check_written(backend, "swa", world.mapping[loc[[10, 11]]], 256)
    for ratio, name in ((4, "c4"), (128, "c128")):
        ends = loc[[ratio - 1, 2 * ratio - 1]]
        backend.set_extra_key_buffer(ratio, world.int64([ends[0], 0, -1, ends[1], -7, 2**40]), rows)
        check_written(backend, name, ends // ratio, 256 // ratio)


def test_backends_of_one_runner_can_share_pools(poisoned, backend_class, draw):
    world, backend = poisoned()
    other = backend_class(world.runner, backend.cache)
    for name, buffer in other.kv_buffers().items():
        assert buffer.data_ptr() == backend.kv_buffers()[name].data_ptr()
    batch, rows = world.batch("decode", [127, 255])
    other.init_forward_metadata(batch)
    other.store_kv(batch, draw(2, 512))
    check_written(backend, "swa", world.mapping[rows.loc], 256)
