"""The metadata kernel against the numpy statement of attention.md §3.2: every field, mode and boundary."""

from __future__ import annotations

import numpy as np
import pytest
import torch

BOUNDARIES = (1, 2, 3, 4, 5, 126, 127, 128, 129, 255, 256, 257, 258, 383, 384, 511, 512)


def core_of(backend, batch):
    backend.init_forward_metadata(batch)
    return backend.forward_metadata.core_attn_metadata


@pytest.mark.parametrize("index_topk", [512, 1024])
def test_decode_at_every_boundary(make_world, backend_class, check_fields, index_topk):
    world = make_world(BOUNDARIES, index_topk=index_topk)
    batch, rows = world.batch("decode", [n - 1 for n in BOUNDARIES])
    core = core_of(backend_class(world.runner), batch)
    assert (core.page_size, core.index_topk, core.c4_sparse_topk) == (256, index_topk, index_topk)
    check_fields(core, world, rows, pages=2)


def test_decode_at_every_position_of_two_pages(make_world, backend_class, check_fields):
    world = make_world([512] * 512)
    batch, rows = world.batch("decode", range(512))
    check_fields(core_of(backend_class(world.runner), batch), world, rows, pages=2)


def test_page_table_has_the_width_of_the_longest_request(make_world, backend_class, check_fields):
    world = make_world([256, 700], context=2048)
    batch, rows = world.batch("decode", [255, 699])
    check_fields(core_of(backend_class(world.runner), batch), world, rows, pages=3)
    batch, rows = world.batch("decode", [255])
    check_fields(core_of(backend_class(world.runner), batch), world, rows, pages=1)


def test_lengths_that_only_the_device_knows_give_full_width(make_world, backend_class, check_fields):
    world = make_world([256, 700], context=2048)
    for mode, counts, pages in (("decode", [1, 1], 8), ("target_verify", [3, 3], 8), ("extend", [2, 5], 8)):
        prefixes = [length - count for length, count in zip(world.lengths, counts, strict=True)]
        batch, rows = world.batch(mode, prefixes, counts, on_host=False)
        check_fields(core_of(backend_class(world.runner), batch), world, rows, pages=pages)


def test_more_columns_than_one_program_takes(make_world, backend_class, check_fields):
    """65,536 tokens fill one column block; the last entries lie in the second."""
    world = make_world([65_536 + 300, 5], context=65_536 + 512)
    batch, rows = world.batch("decode", [65_536 + 299, 4])
    core = core_of(backend_class(world.runner), batch)
    check_fields(core, world, rows, pages=258)
    assert (core.c128_page_indices[0] >= 0).sum() == (65_536 + 300) // 128


@pytest.mark.parametrize("draft_tokens", range(2, 9))
def test_verify_at_every_position_modulo_4_and_128(make_world, backend_class, check_fields, draft_tokens):
    """Prefixes 1 to 256 cross every emission of both ratios inside the draft span."""
    prefixes = range(1, 257)
    world = make_world([512] * len(prefixes))
    batch, rows = world.batch("target_verify", prefixes, [draft_tokens] * len(prefixes))
    check_fields(core_of(backend_class(world.runner), batch), world, rows, pages=-(-(256 + draft_tokens) // 256))


def test_verify_width_is_the_runners_where_the_batch_is_silent(make_world, backend_class, check_fields):
    world = make_world([200, 100], speculative_num_draft_tokens=4)
    batch, rows = world.batch("target_verify", [126, 62], [4, 4])
    batch.draft_token_num = None
    check_fields(core_of(backend_class(world.runner), batch), world, rows, pages=1)


@pytest.mark.parametrize("counts", [(3, 1, 5), (1, 0, 2), (0, 0, 7), (8, 8, 1)])
def test_ragged_verify(make_world, backend_class, check_fields, counts):
    prefixes = [126, 254, 3]
    world = make_world([300, 300, 300])
    batch, rows = world.batch("target_verify", prefixes, counts, ragged=True)
    pages = -(-(max(prefixes) + sum(counts)) // 256)
    check_fields(core_of(backend_class(world.runner), batch), world, rows, pages=pages)


@pytest.mark.parametrize(
    ("prefixes", "counts"),
    [((0,), (300,)), ((254, 255, 256), (1, 1, 1)), ((0, 130, 5), (3, 0, 129)), ((250,), (12,)), ((0, 0), (1, 2))],
)
def test_extend(make_world, backend_class, check_fields, prefixes, counts):
    world = make_world([512] * len(prefixes))
    batch, rows = world.batch("extend", prefixes, counts)
    core = core_of(backend_class(world.runner), batch)
    check_fields(core, world, rows, pages=-(-max(np.add(prefixes, counts)) // 256))
    assert core.c4_sparse_raw_indices.shape == core.c4_sparse_page_indices.shape
    assert (core.c4_sparse_raw_indices == -1).all()


def test_extend_of_many_requests_needs_several_scan_blocks(make_world, backend_class, check_fields):
    counts = [1 + i % 3 for i in range(300)]
    world = make_world([8] * 300, context=256)
    batch, rows = world.batch("extend", [i % 5 for i in range(300)], counts)
    check_fields(core_of(backend_class(world.runner), batch), world, rows, pages=1)


def test_extend_pad_rows_are_one_token_of_the_last_request(make_world, backend_class, check_fields):
    world = make_world([40, 300])
    batch, rows = world.batch("extend", [30, 290], [4, 10])
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, batch.out_cache_loc.new_zeros(50)])
    core = core_of(backend_class(world.runner), batch)
    check_fields(core, world, rows.then(world.pad_rows(50, request=1)), pages=2)


@pytest.mark.parametrize("counts", [(1, 4), (3, 2), (4, 4), (128, 2)])
def test_draft_extend_has_true_lengths_and_no_compressed_fields(make_world, backend_class, check_fields, counts):
    prefixes = [64, 96]
    world = make_world([300, 300])
    batch, rows = world.batch("draft_extend", prefixes, counts, on_host=False)
    check_fields(core_of(backend_class(world.runner), batch), world, rows, pages=2, compress=False)


def test_draft_extend_without_row_counts_is_uniform(make_world, backend_class, check_fields):
    world = make_world([300, 300])
    batch, rows = world.batch("draft_extend", [64, 96], [4, 4])
    batch.extend_seq_lens = batch.extend_seq_lens_cpu = None
    check_fields(core_of(backend_class(world.runner), batch), world, rows, pages=1, compress=False)


def test_draft_extend_rows_before_the_first_token_have_no_key(make_world, backend_class, check_fields):
    """A pad request of length 1 with four rows derives lengths -2 .. 1."""
    world = make_world([300, 300])
    batch, rows = world.batch("draft_extend", [64], [4])
    batch.seq_lens = world.int64([68, 1])
    batch.req_pool_indices = world.int64([0, 0])
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, batch.out_cache_loc.new_zeros(4)])
    batch.extend_seq_lens = batch.extend_seq_lens_cpu = batch.seq_lens_cpu = None
    pads = world.pad_rows(4)
    pads.position[:] = [-3, -2, -1, 0]
    core = core_of(backend_class(world.runner), batch)
    check_fields(core, world, rows.then(pads), pages=2, compress=False)
    assert core.swa_topk_lengths[4:].tolist() == [-2, -1, 0, 1]
    assert (core.swa_page_indices[4:7] == -1).all()


def test_locations_of_any_stride_and_dtype(make_world, backend_class, check_fields):
    world = make_world([300, 300])
    batch, rows = world.batch("decode", [127, 254])
    wide = torch.stack([batch.out_cache_loc, torch.full_like(batch.out_cache_loc, -7)], dim=1)
    batch.out_cache_loc = wide[:, 0]
    batch.seq_lens = batch.seq_lens.int()
    batch.req_pool_indices = batch.req_pool_indices.int()
    check_fields(core_of(backend_class(world.runner), batch), world, rows, pages=1)


def test_tables_are_read_at_every_step(make_world, backend_class, check_fields):
    """The scheduler changes both tables in place between steps; nothing translated survives a step."""
    world = make_world([300, 300])
    backend = backend_class(world.runner)
    batch, rows = world.batch("decode", [299, 200])
    core_of(backend, batch)
    mapping = world.runner.full_to_swa_index_mapping
    mapping[1:-1] = mapping[1:-1].flip(0)
    world.runner.req_to_token.copy_(world.runner.req_to_token.flip(0))
    world.__post_init__()
    check_fields(core_of(backend, batch), world, rows, pages=2)


def test_an_entry_outside_the_map_is_absent_and_never_read(make_world, backend_class):
    """A stale entry inside the window (a scheduler's mistake) is dropped instead of read out of bounds."""
    world = make_world([10, 10])
    world.runner.req_to_token[0, 7] = 2**31 - 1
    world.runner.req_to_token[0, 8] = -5
    batch, _ = world.batch("decode", [9, 9])
    batch.out_cache_loc = world.int64([2**40, 300])
    core = core_of(backend_class(world.runner), batch)
    assert core.swa_page_indices[0, :4].tolist()[1:3] == [-1, -1]
    assert (core.swa_page_indices[0, [0, *range(3, 10)]] >= 0).all()
    assert core.swa_out_cache_loc[0] == 0


def test_the_statement_notices_a_wrong_field(make_world, backend_class, check_fields):
    """The check itself: each field off by one in one element is caught."""
    world = make_world([300, 300])
    batch, rows = world.batch("decode", [255, 127])
    core = core_of(backend_class(world.runner), batch)
    for name in (
        "page_table",
        "swa_page_indices",
        "c128_page_indices",
        "c4_out_loc",
        "swa_topk_lengths",
        "raw_out_loc",
    ):
        tensor = getattr(core, name).view(-1)
        tensor[-1] += 1
        with pytest.raises(AssertionError, match=name):
            check_fields(core, world, rows, pages=1)
        tensor[-1] -= 1
    check_fields(core, world, rows, pages=1)
