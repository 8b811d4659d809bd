"""The contract of breakable CUDA graphs, attention.md §7.1, against this backend."""

from __future__ import annotations

import pytest
import torch
from dsv4_triton.breakable import SharedReadEnds
from dsv4_triton.forward_metadata import DSV4Metadata
from dsv4_triton.sparse_prefill import SparsePrefillWorkspace, takes_sparse_path

COPIED = (
    "raw_out_loc",
    "seq_lens_casual",
    "positions_casual",
    "c4_out_loc",
    "c128_out_loc",
    "c4_topk_lengths_raw",
    "c4_topk_lengths_clamp1",
    "c4_sparse_topk_lengths",
)
ASSIGNED = (
    "page_table",
    "swa_page_indices",
    "swa_topk_lengths",
    "c128_page_indices",
    "c128_topk_lengths_clamp1",
    "c0_flashmla_metadata",
    "c4_flashmla_metadata",
    "c128_flashmla_metadata",
)
UNTOUCHED = ("c4_sparse_page_indices", "c4_sparse_raw_indices", "swa_out_cache_loc")


@pytest.fixture
def two_extends(make_world, backend_class):
    """A backend, metadata captured for one batch, and another batch of the same extents."""
    world = make_world([300, 300], context=1024)
    backend = backend_class(world.runner)
    first, _ = world.batch("extend", [10, 20], [3, 2], on_host=False)
    second, rows = world.batch("extend", [253, 127], [3, 2], on_host=False)
    backend.init_forward_metadata(first)
    return world, backend, backend.forward_metadata, second, rows


def test_captured_metadata_is_used_only_if_an_engine_asks(backend_class):
    assert backend_class.use_captured_forward_metadata_for_breakable_cuda_graph is True
    assert backend_class.prefill_war_read_done is False


def test_refresh_copies_assigns_and_leaves_alone(two_extends):
    _, backend, captured, batch, _ = two_extends
    core = captured.core_attn_metadata
    before = {name: getattr(core, name) for name in (*COPIED, *ASSIGNED, *UNTOUCHED)}
    untouched = {name: before[name].clone() for name in UNTOUCHED}
    backend.init_forward_metadata(batch)
    fresh = backend.forward_metadata.core_attn_metadata
    core.refresh_for_breakable_cuda_graph_replay_(fresh)
    for name in COPIED:
        assert getattr(core, name) is before[name], name
        assert torch.equal(getattr(core, name), getattr(fresh, name)), name
    for name in ASSIGNED:
        assert getattr(core, name) is getattr(fresh, name), name
    for name in UNTOUCHED:
        assert getattr(core, name) is before[name], name
        assert torch.equal(before[name], untouched[name]), name


def test_refresh_refuses_what_differs(two_extends):
    _, backend, captured, batch, _ = two_extends
    backend.init_forward_metadata(batch)
    fresh = backend.forward_metadata.core_attn_metadata
    captured.core_attn_metadata.c4_out_loc = None
    with pytest.raises(AssertionError, match="c4_out_loc"):
        captured.core_attn_metadata.refresh_for_breakable_cuda_graph_replay_(fresh)
    fresh.c4_out_loc = None
    captured.core_attn_metadata.refresh_for_breakable_cuda_graph_replay_(fresh)
    for name, other in (("index_topk", 1024), ("page_size", 128), ("cuda_int32_kwargs", {})):
        sound = getattr(fresh, name)
        setattr(fresh, name, other)
        with pytest.raises(AssertionError, match=name):
            captured.core_attn_metadata.refresh_for_breakable_cuda_graph_replay_(fresh)
        setattr(fresh, name, sound)


def test_replay_is_built_once_from_the_static_batch_as_wide_as_at_capture(two_extends, check_fields, monkeypatch):
    world, backend, captured, static, rows = two_extends
    live, _ = world.batch("extend", [1], [1])
    built = []
    build = backend.build_metadata
    monkeypatch.setattr(backend, "build_metadata", lambda layout: built.append(layout) or build(layout))
    captured.sparse_prefill_cache, captured.prefill_shared_reads_snapshotted = object(), True
    held = {name: captured.core_attn_metadata.__dict__[name].data_ptr() for name in COPIED}
    indexer, lengths = captured.indexer_metadata, captured.indexer_metadata.c4_seq_lens
    backend.prepare_forward_metadata_for_breakable_cuda_graph_replay(captured, live, static_forward_batch=static)
    assert backend.forward_metadata is captured
    assert [layout.max_seq_len for layout in built] == [1024]
    assert built[0].seq_lens is static.seq_lens
    assert captured.sparse_prefill_cache is None
    assert captured.prefill_shared_reads_snapshotted is False
    core = captured.core_attn_metadata
    assert core.seq_lens_casual.tolist() == (rows.position + 1).tolist()
    assert core.page_table.shape[1] == 4
    assert {name: getattr(core, name).data_ptr() for name in COPIED} == held, "what a graph holds stays where it is"
    assert captured.indexer_metadata is indexer
    assert indexer.c4_seq_lens is lengths
    assert torch.equal(lengths, core.c4_topk_lengths_raw)
    core.swa_out_cache_loc = torch.as_tensor(world.mapping[rows.loc], device=core.page_table.device).int()
    check_fields(core, world, rows, pages=4)


def test_replay_falls_back_to_the_live_batch(two_extends):
    _, backend, captured, live, rows = two_extends
    backend.prepare_forward_metadata_for_breakable_cuda_graph_replay(captured, live)
    assert captured.core_attn_metadata.positions_casual.tolist() == rows.position.tolist()


def test_replay_needs_captured_metadata(two_extends):
    _, backend, captured, live, _ = two_extends
    with pytest.raises(AssertionError, match="expected DSV4Metadata"):
        backend.prepare_forward_metadata_for_breakable_cuda_graph_replay(None, live)
    assert backend.forward_metadata is captured


def test_multi_step_replay_needs_metadata_of_every_step(make_world, backend_class):
    world = make_world([100, 200])
    multi = backend_class.multi_step(world.runner, num_steps=3)
    flat, _ = world.batch("decode", [64, 96], on_host=False)
    flat.out_cache_loc = torch.arange(300, 306, device=flat.seq_lens.device)
    multi.init_forward_metadata(flat)
    captured = [backend.forward_metadata for backend in multi.attn_backends]
    with pytest.raises(AssertionError, match="captured metadata of 1 steps"):
        multi.prepare_forward_metadata_for_breakable_cuda_graph_replay(captured[:1], flat)
    with pytest.raises(AssertionError, match="expected DSV4Metadata"):
        multi.prepare_forward_metadata_for_breakable_cuda_graph_replay([captured[0], None], flat)
    flat.seq_lens = flat.seq_lens + 1
    multi.prepare_forward_metadata_for_breakable_cuda_graph_replay(captured, flat)
    assert [step.core_attn_metadata.positions_casual.tolist() for step in captured] == [[66, 98], [67, 99]]
    assert [backend.forward_metadata for backend in multi.attn_backends] == captured


def test_shared_reads_end_before_the_replay_only_if_snapshotted(two_extends):
    _, backend, captured, _, _ = two_extends
    backend.forward_metadata = captured
    assert backend.shared_read_ends("extend") is SharedReadEnds.UNKNOWN
    captured.prefill_shared_reads_snapshotted = True
    assert backend.shared_read_ends("extend") is SharedReadEnds.PRE_REPLAY
    assert backend.shared_read_ends("decode") is SharedReadEnds.UNKNOWN
    assert backend.shared_read_ends("target_verify") is SharedReadEnds.POST_REPLAY


@pytest.fixture
def snapshotting(two_extends, monkeypatch):
    """A backend whose engine waits for shared reads, and the row counts that chunk caches were built for."""
    world, backend, captured, batch, _ = two_extends
    backend.runner.prefill_path = "auto"
    backend.prefill_war_read_done = True
    builds = []

    def build(batch, *, num_qo_tokens):
        if num_qo_tokens == 12288:
            raise RuntimeError("snapshot failed")
        builds.append(num_qo_tokens)

    monkeypatch.setattr(backend, "build_sparse_prefill_cache", build)
    return world, backend, captured, batch, builds


@pytest.mark.parametrize(("rows", "built"), [(1, []), (11673, []), (11674, [11674])])
def test_snapshot_builds_a_chunk_cache_above_the_threshold(snapshotting, rows, built):
    _, backend, captured, batch, builds = snapshotting
    backend.prepare_prefill_shared_read_snapshot(batch, rows)
    assert builds == built
    assert captured.prefill_shared_reads_snapshotted is True


def test_snapshot_builds_one_on_the_sparse_path_at_any_size(snapshotting):
    _, backend, _, batch, builds = snapshotting
    backend.runner.prefill_path = "sparse"
    backend.prepare_prefill_shared_read_snapshot(batch, 7)
    assert builds == [7]


def test_a_failed_snapshot_propagates_and_is_not_flagged(snapshotting):
    _, backend, captured, batch, _ = snapshotting
    captured.prefill_shared_reads_snapshotted = True
    with pytest.raises(RuntimeError, match="snapshot failed"):
        backend.prepare_prefill_shared_read_snapshot(batch, 12288)
    assert captured.prefill_shared_reads_snapshotted is False


@pytest.mark.parametrize("why", ["not asked for", "another mode"])
def test_no_snapshot_where_nobody_waits(snapshotting, why):
    world, backend, captured, batch, builds = snapshotting
    captured.prefill_shared_reads_snapshotted = True
    if why == "not asked for":
        backend.prefill_war_read_done = False
    else:
        batch, _ = world.batch("decode", [3])
    backend.prepare_prefill_shared_read_snapshot(batch, 11674)
    assert builds == []
    assert captured.prefill_shared_reads_snapshotted is False


def test_a_snapshot_is_what_the_forward_then_uses(two_extends):
    """Built before the replay, the chunk cache is not built again: later changes of the tables are not seen."""
    world, backend, _, batch, _ = two_extends
    backend.runner.prefill_path = "sparse"
    backend.prefill_war_read_done = True
    backend.init_forward_metadata(batch)
    assert isinstance(backend.forward_metadata, DSV4Metadata)
    backend.prepare_prefill_shared_read_snapshot(batch, 5)
    cache = backend.forward_metadata.sparse_prefill_cache
    kept = cache.swa_token_ids.clone()
    world.runner.req_to_token.zero_()
    assert backend.sparse_prefill_cache(batch) is cache
    assert torch.equal(cache.swa_token_ids, kept)


@pytest.mark.parametrize(
    ("rows", "path", "taken"),
    [(11673, "auto", False), (11674, "auto", True), (1, "sparse", True), (0, "sparse", False), (11674, "dense", False)],
)
def test_path_of_an_extend(make_world, rows, path, taken):
    world = make_world([10])
    batch, _ = world.batch("extend", [0], [1])
    assert takes_sparse_path(batch, rows, path) is taken
    batch.forward_mode = "decode"
    assert takes_sparse_path(batch, rows, path) is False


def test_workspace_is_reused_grows_and_never_shrinks(device):
    workspace = SparsePrefillWorkspace(device)
    first = workspace.get(3)
    assert first.shape == (3, 1, 512)
    assert first.dtype == torch.bfloat16
    assert workspace.get(2).data_ptr() == first.data_ptr()
    held = workspace.buffer
    bigger = workspace.get(7)
    assert bigger.shape == (7, 1, 512)
    assert workspace.buffer is not held
    assert workspace.get(1).data_ptr() == bigger.data_ptr()
    assert workspace.buffer.shape[0] == 7
    assert workspace.get(1, torch.float32).dtype == torch.float32
    for rows in (0, -1):
        with pytest.raises(AssertionError, match="expected at least 1"):
            workspace.get(rows)
