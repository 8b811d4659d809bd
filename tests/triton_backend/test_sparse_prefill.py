"""The sparse-prefill path: gather lists, extents, combined indices, and agreement with the dense path."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dsv4_triton import attention_calls, sparse_prefill

CASES = [
    ((0,), (5,)),
    ((48,), (16,)),
    ((254, 0), (4, 3)),
    ((300, 130, 2), (2, 6, 0)),
    ((126, 127, 128), (1, 2, 3)),
]


def built(make_world, backend_class, prefixes, counts, *, on_host=True, pads=0):
    world = make_world([512] * len(prefixes))
    backend = backend_class(world.runner)
    batch, rows = world.batch("extend", prefixes, counts, on_host=on_host)
    if pads:
        batch.out_cache_loc = torch.cat([batch.out_cache_loc, batch.out_cache_loc.new_zeros(pads)])
        rows = rows.then(world.pad_rows(pads, request=len(prefixes) - 1))
    backend.init_forward_metadata(batch)
    return world, backend, batch, rows


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize(("prefixes", "counts"), CASES)
def test_gather_lists(make_world, backend_class, prefixes, counts, on_host):
    world, backend, batch, rows = built(make_world, backend_class, prefixes, counts, on_host=on_host)
    cache = backend.sparse_prefill_cache(batch)
    total = np.add(prefixes, counts)
    gathered = np.minimum(total, np.add(counts, 127))
    first = total - gathered
    want = np.concatenate(
        [world.mapping[world.table[r, f:t]] for r, (f, t) in enumerate(zip(first, total, strict=True))]
    )
    assert cache.first_positions.tolist() == first.tolist()
    assert cache.swa_offsets.tolist() == [0, *np.cumsum(gathered)]
    assert cache.query_start_loc.tolist() == [0, *np.cumsum(counts)]
    assert cache.request.tolist() == rows.request.tolist()
    np.testing.assert_array_equal(cache.swa_token_ids[: len(want)].cpu().numpy(), want)
    if on_host:
        assert cache.swa_token_ids.shape[0] == len(want)
    else:
        assert cache.swa_token_ids.shape[0] == len(rows.position) + 127 * len(prefixes)
        assert (cache.swa_token_ids[len(want) :] == 0).all()
    assert backend.sparse_prefill_cache(batch) is cache, "one chunk cache a forward, shared by its layers"


@pytest.mark.parametrize("max_seq_len", [3, 4, 255, 256, 259, 260])
def test_c4_live_extent(device, max_seq_len):
    page_table = torch.zeros(2, 4096, dtype=torch.int32, device=device)
    region = sparse_prefill.c4_region(page_table, torch.tensor([0, 1], device=device), max_seq_len)
    extent = max(max_seq_len // 4, 1)
    assert region.slots.shape == (2 * extent,)
    assert region.base.tolist() == [0, extent]


@pytest.mark.parametrize("max_seq_len", [127, 128, 255, 256])
def test_c128_live_extent(make_world, backend_class, device, monkeypatch, max_seq_len):
    """Not the capacity of 8192 columns: neither for the gather nor for the combined lists."""
    _, backend, batch, _ = built(make_world, backend_class, (10, 20), (1, 1))
    cache = backend.sparse_prefill_cache(batch)
    cache.max_seq_len = max_seq_len
    core = backend.forward_metadata.core_attn_metadata
    core.c128_page_indices = torch.full((2, 8192), -1, dtype=torch.int32, device=device)
    calls = []
    combine = sparse_prefill.combine_topk_swa_indices
    monkeypatch.setattr(sparse_prefill, "combine_topk_swa_indices", lambda *a, **k: calls.append(k) or combine(*a, **k))
    indices, _, rows = sparse_prefill.combined_indices(core, cache, 128)
    extent = max(max_seq_len // 128, 1)
    assert rows == 2 * extent == cache.regions[128].slots.shape[0]
    assert [(call["topk"], tuple(call["topk_indices"].shape)) for call in calls] == [(extent, (2, extent))]
    assert indices.shape[1] == 256
    sparse_prefill.combined_indices(core, cache, 128)
    assert len(calls) == 1, "the next layer of the forward uses the same lists"


def test_extents_beyond_what_the_metadata_lists_are_refused(device):
    rows = torch.tensor([0], device=device)
    with pytest.raises(AssertionError, match="65 entries of ratio 4, more than the 64"):
        sparse_prefill.c4_region(torch.zeros(1, 1, dtype=torch.int32, device=device), rows, 260)
    with pytest.raises(AssertionError, match="3 entries of ratio 128, more than the 2"):
        sparse_prefill.c128_region(torch.zeros(1, 2, dtype=torch.int32, device=device), rows, 384)


@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize(("prefixes", "counts"), CASES)
def test_combined_lists(make_world, backend_class, device, prefixes, counts, ratio):
    """Per row: the selected or all entries, then the window ascending, then -1; decoded back to positions."""
    _, backend, batch, rows = built(make_world, backend_class, prefixes, counts, pads=3)
    core = backend.forward_metadata.core_attn_metadata
    generator = np.random.default_rng(ratio)
    raw = np.full((len(rows.position), 512), -1, np.int32)
    for row, position in enumerate(rows.position):
        raw[row, : (position + 1) // 4] = generator.permutation((position + 1) // 4)
    backend.write_c4_selection(torch.as_tensor(raw, device=device))
    cache = backend.sparse_prefill_cache(batch)
    indices, lengths, compressed = sparse_prefill.combined_indices(core, cache, ratio)
    assert indices.shape[1] % 128 == 0
    extent = max(cache.max_seq_len // ratio, 1) if ratio else 0
    assert compressed == extent * len(prefixes)
    real = sum(counts)
    for row in range(real):
        position, request = int(rows.position[row]), int(rows.request[row])
        count = (position + 1) // ratio if ratio else 0
        entries = raw[row, :count] if ratio == 4 else np.arange(count)
        window = np.arange(max(0, position - 127), position + 1)
        at = compressed + int(cache.swa_offsets[request]) + window - int(cache.first_positions[request])
        want = [*(entries + request * extent), *at]
        got = indices[row].tolist()
        assert got[: len(want)] == want
        assert set(got[len(want) :]) <= {-1}
        assert int(lengths[row]) == len(want)
    assert int(indices.max()) < compressed + cache.swa_token_ids.shape[0]
    first = cache.first_positions[-1]
    for row in range(real, real + 3):
        window = int(first) == 0
        assert (indices[row] >= 0).sum() == window, "a pad row reads position 0 of the last request or nothing"


@pytest.fixture
def two_paths(make_world, backend_class, draw, device):
    """Outputs of the dense and the sparse path over the same bytes; everything that nobody wrote is NaN."""

    def run(prefixes, counts, ratio, *, on_host=True, pads=0):
        world, backend, batch, rows = built(make_world, backend_class, prefixes, counts, on_host=on_host, pads=pads)
        for buffer in backend.kv_buffers().values():
            buffer.fill_(0xFF)
        for request, prefix in enumerate(prefixes):
            if prefix:
                backend.set_key_buffer(world.int64(world.table[request, :prefix]), draw(prefix, 512))
            if ratio and prefix >= ratio:
                ends = world.table[request, ratio - 1 : prefix : ratio]
                backend.set_extra_key_buffer(ratio, world.int64(ends), draw(len(ends), 512))
        count = len(rows.position)
        raw = np.full((count, 512), -1, np.int32)
        generator = np.random.default_rng(ratio)
        for row, position in enumerate(rows.position):
            held = generator.permutation((position + 1) // 4)
            raw[row, : len(held)] = held
        q, k, sink = draw(count, 16, 512), draw(count, 512), draw(16, dtype=torch.float32)
        answers = {}
        for path in ("dense", "sparse"):
            backend.runner.prefill_path = path
            backend.init_forward_metadata(batch)
            backend.store_kv(batch, k)
            if ratio:
                backend.store_compressed(batch, ratio, k)
            backend.write_c4_selection(torch.as_tensor(raw, device=device))
            answers[path] = backend.forward(q, batch, ratio, sink)
            taken = backend.forward_metadata.sparse_prefill_cache is not None
            assert taken == (path == "sparse")
        return answers["dense"], answers["sparse"], sum(counts)

    return run


def check_agree(dense, sparse, rows: int) -> None:
    """bf16 outputs of two summation orders: two roundings of 2**-9, and fp32 in lse."""
    assert torch.isfinite(dense[0][:rows]).all()
    torch.testing.assert_close(sparse[0][:rows], dense[0][:rows], atol=2**-8, rtol=2**-7)
    torch.testing.assert_close(sparse[1][:rows], dense[1][:rows], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize(
    ("prefixes", "counts", "pads", "on_host"), [((126, 254), (3, 2), 1, True), ((0, 380), (1, 5), 0, False)]
)
def test_paths_agree(two_paths, prefixes, counts, ratio, pads, on_host):
    dense, sparse, rows = two_paths(prefixes, counts, ratio, on_host=on_host, pads=pads)
    check_agree(dense, sparse, rows)


def test_the_agreement_notices_one_key_too_few(two_paths, monkeypatch):
    combine = sparse_prefill.combined_indices

    def short(core, cache, ratio):
        indices, lengths, compressed = combine(core, cache, ratio)
        return indices, lengths - 1, compressed

    monkeypatch.setattr(attention_calls, "combined_indices", short)
    dense, sparse, rows = two_paths((126, 254), (3, 2), 4)
    with pytest.raises(AssertionError):
        check_agree(dense, sparse, rows)


def test_missing_raw_selection(make_world, backend_class):
    _, backend, batch, _ = built(make_world, backend_class, (10,), (2,))
    core = backend.forward_metadata.core_attn_metadata
    core.c4_sparse_raw_indices = None
    with pytest.raises(AssertionError, match="c4_sparse_raw_indices is missing"):
        sparse_prefill.combined_indices(core, backend.sparse_prefill_cache(batch), 4)


def test_a_batch_without_row_counts_has_no_chunk_cache():
    layout = SimpleNamespace(lens=None)
    with pytest.raises(AssertionError, match="no extend_seq_lens"):
        sparse_prefill.build_cache(layout, None, None, None)
