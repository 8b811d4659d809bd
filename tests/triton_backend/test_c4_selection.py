"""The C4 indexer's choice becomes slots: column by column, nothing outside what a row may see."""

from __future__ import annotations

import numpy as np
import pytest
import torch


def slots_of(world, rows, raw: np.ndarray) -> np.ndarray:
    """Slot of entry j: page of its 256 tokens times 64, plus j modulo 64."""
    count = ((rows.position + 1) // 4)[:, None]
    valid = (raw >= 0) & (raw < count)
    entry = np.where(valid, raw, 0)
    page = world.table[rows.request[:, None], entry // 64 * 256].astype(np.int64) // 256
    return np.where(valid, page * 64 + entry % 64, -1)


@pytest.fixture
def choice(make_world, backend_class):
    """Rows at every position modulo 4 over three pages, and a hostile choice for each."""

    def make(mode="decode", index_topk=512):
        world = make_world([700] * 4, context=768, index_topk=index_topk)
        prefixes, counts = [2, 255, 256, 650], [1, 1, 1, 1]
        if mode == "extend":
            counts = [3, 5, 2, 4]
        batch, rows = world.batch(mode, prefixes, counts)
        backend = backend_class(world.runner)
        backend.init_forward_metadata(batch)
        generator = np.random.default_rng(7)
        raw = generator.integers(-3, 180, (len(rows.position), index_topk)).astype(np.int32)
        raw[:, 0] = (rows.position + 1) // 4 - 1
        raw[:, 1] = (rows.position + 1) // 4
        raw[:, 2:6] = [2**31 - 1, -(2**31), -1, 2**30]
        return world, backend, rows, raw

    return make


@pytest.mark.parametrize("index_topk", [512, 1024])
@pytest.mark.parametrize("mode", ["decode", "extend"])
def test_slots(choice, device, mode, index_topk):
    world, backend, rows, raw = choice(mode, index_topk)
    backend.write_c4_selection(torch.as_tensor(raw, device=device))
    core = backend.forward_metadata.core_attn_metadata
    want = slots_of(world, rows, raw)
    np.testing.assert_array_equal(core.c4_sparse_page_indices.cpu().numpy(), want)
    assert (want[:, 1:6] == -1).all()
    if mode == "extend":
        count = ((rows.position + 1) // 4)[:, None]
        kept = np.where((raw >= 0) & (raw < count), raw, -1)
        np.testing.assert_array_equal(core.c4_sparse_raw_indices.cpu().numpy(), kept)
    else:
        assert core.c4_sparse_raw_indices is None


def test_rows_of_any_stride(choice, device):
    world, backend, rows, raw = choice()
    wide = torch.full((len(raw), 3, 512), 1, dtype=torch.int32, device=device)
    wide[:, 1] = torch.as_tensor(raw)
    backend.write_c4_selection(wide[:, 1])
    got = backend.forward_metadata.core_attn_metadata.c4_sparse_page_indices
    np.testing.assert_array_equal(got.cpu().numpy(), slots_of(world, rows, raw))


def test_fewer_or_more_rows_than_the_metadata(choice, device):
    world, backend, rows, raw = choice("extend")
    given = torch.as_tensor(raw, device=device)
    core = backend.forward_metadata.core_attn_metadata
    backend.write_c4_selection(torch.cat([given, given]))
    want = slots_of(world, rows, raw)
    np.testing.assert_array_equal(core.c4_sparse_page_indices.cpu().numpy(), want)
    backend.init_forward_metadata(world.batch("extend", [2, 255, 256, 650], [3, 5, 2, 4])[0])
    core = backend.forward_metadata.core_attn_metadata
    backend.write_c4_selection(given[:3])
    want[3:] = -1
    np.testing.assert_array_equal(core.c4_sparse_page_indices.cpu().numpy(), want)
    assert (core.c4_sparse_raw_indices[3:] == -1).all()
    backend.write_c4_selection(given[:0])
    np.testing.assert_array_equal(core.c4_sparse_page_indices.cpu().numpy(), want)


def test_every_metadata_step_starts_without_a_selection(choice, device):
    world, backend, _, raw = choice()
    backend.write_c4_selection(torch.as_tensor(raw, device=device))
    backend.init_forward_metadata(world.batch("decode", [2, 255, 256, 650])[0])
    assert (backend.forward_metadata.core_attn_metadata.c4_sparse_page_indices == -1).all()


def test_an_entry_beyond_the_page_table_is_dropped(choice, device):
    """Lengths that disagree with the table (a scheduler's mistake) must not read past the row."""
    _, backend, rows, _ = choice()
    core = backend.forward_metadata.core_attn_metadata
    core.c4_topk_lengths_raw.fill_(10_000)
    raw = torch.full((len(rows.position), 512), 64 * core.page_table.shape[1], dtype=torch.int32, device=device)
    backend.write_c4_selection(raw)
    assert (core.c4_sparse_page_indices == -1).all()
