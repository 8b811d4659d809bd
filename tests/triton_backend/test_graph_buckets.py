"""Bucket rules of attention.md §5.4: captured tensors keep their addresses and hold the replayed batch, padded."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

CONTEXT = 1024


def addresses(metadata) -> dict[str, int]:
    core = metadata.core_attn_metadata
    return {
        field.name: getattr(core, field.name).data_ptr()
        for field in fields(core)
        if isinstance(getattr(core, field.name), torch.Tensor)
    }


def captured(backend, batch):
    """Capture as a harness does: prepare, warm up, reset, run the in-graph part that a graph records."""
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    backend.on_after_cuda_graph_warmup()
    backend.init_forward_metadata_in_graph(batch)
    return backend.forward_metadata


def replayed(backend, batch):
    """Prepare a replay, then what the graph would execute."""
    backend.init_forward_metadata_out_graph(batch)
    backend.init_forward_metadata_in_graph(batch)
    return backend.forward_metadata.core_attn_metadata


def test_decode_replays_of_a_growing_and_shrinking_batch(make_world, backend_class, check_fields):
    world = make_world([1024] * 4, context=CONTEXT)
    backend = backend_class(world.runner)
    backend.init_cuda_graph_state(4, 4)
    largest, _ = world.batch("decode", [0] * 4)
    metadata = captured(backend, largest)
    check_fields(metadata.core_attn_metadata, world, world.pad_rows(4), pages=4)
    before = addresses(metadata)
    for prefixes in ([127, 255, 3, 600], [130, 2], [], [1023, 126, 127], [0]):
        batch, rows = world.batch("decode", prefixes)
        core = replayed(backend, batch)
        check_fields(core, world, rows.then(world.pad_rows(4 - len(prefixes))), pages=4)
        assert addresses(backend.forward_metadata) == before
        assert backend.forward_metadata is metadata


def test_a_batch_that_is_padded_already_is_taken_as_it_is(make_world, backend_class, check_fields):
    world = make_world([300] * 2, context=CONTEXT)
    backend = backend_class(world.runner)
    backend.init_cuda_graph_state(4, 4)
    static, rows = world.batch("decode", [255, 127, 0, 0], requests=[1, 0, 0, 0])
    captured(backend, static)
    static.out_cache_loc[2:] = 0
    rows.loc[2:] = 0
    check_fields(replayed(backend, static), world, rows, pages=4)


def test_an_idle_replay_reads_one_token_of_request_row_0_and_writes_nowhere(make_world, backend_class, check_fields):
    world = make_world([300] * 2, context=CONTEXT)
    backend = backend_class(world.runner)
    backend.init_cuda_graph_state(2, 2)
    batch, rows = world.batch("decode", [255, 127])
    captured(backend, batch)
    replayed(backend, batch)
    for mode, actual in (("decode", "idle"), ("idle", None)):
        batch.forward_mode, batch.actual_forward_mode = mode, actual
        check_fields(replayed(backend, batch), world, world.pad_rows(2), pages=4)
        batch.forward_mode, batch.actual_forward_mode = "decode", None
        check_fields(replayed(backend, batch), world, rows, pages=4)


def test_an_idle_replay_of_any_size_is_safe(make_world, backend_class, check_fields):
    """An idle batch may have no request, so it does not say which graph will be replayed: none may keep live rows."""
    world = make_world([300] * 4, context=CONTEXT)
    backend = backend_class(world.runner)
    backend.init_cuda_graph_state(4, 4)
    steps = {}
    for bs in (2, 4):
        batch, _ = world.batch("decode", [255] * bs)
        captured(backend, batch)
        replayed(backend, batch)
        steps[bs] = backend._captured
    idle, _ = world.batch("idle", [])
    backend.init_forward_metadata_out_graph(idle)
    for bs, step in steps.items():
        assert step.raw.seq_lens.tolist() == [1] * bs
        assert step.raw.out_cache_loc.tolist() == [0] * bs
        assert step.raw.req_pool_indices.tolist() == [0] * bs


def test_the_smallest_captured_graph_that_holds_a_batch(make_world, backend_class):
    world = make_world([300] * 8, context=CONTEXT)
    backend = backend_class(world.runner)
    backend.init_cuda_graph_state(8, 8)
    for bs in (8, 2, 4):
        captured(backend, world.batch("decode", [0] * bs)[0])
    for bs, want in ((1, 2), (2, 2), (3, 4), (5, 8)):
        assert replayed(backend, world.batch("decode", [9] * bs)[0]).rows == want


@pytest.mark.parametrize("draft_tokens", [2, 3, 8])
def test_verify_replays(make_world, backend_class, check_fields, draft_tokens):
    world = make_world([600] * 3, context=CONTEXT)
    backend = backend_class(world.runner)
    backend.init_cuda_graph_state(3, 3 * draft_tokens)
    before = addresses(captured(backend, world.batch("target_verify", [1] * 3, [draft_tokens] * 3)[0]))
    pad = world.pad_rows(0)
    for prefixes in ([126, 254, 2], [511, 125], [64]):
        batch, rows = world.batch("target_verify", prefixes, [draft_tokens] * len(prefixes))
        core = replayed(backend, batch)
        want = rows
        for _ in range(3 - len(prefixes)):
            pad = world.pad_rows(draft_tokens, total=1 + draft_tokens)
            pad.position[:] = 1 + np.arange(draft_tokens)
            want = want.then(pad)
        check_fields(core, world, want, pages=4)
        assert addresses(backend.forward_metadata) == before


def test_ragged_verify_has_a_graph_a_row_count(make_world, backend_class, check_fields):
    world = make_world([600] * 3, context=CONTEXT)
    backend = backend_class(world.runner)
    backend.init_cuda_graph_state(3, 12)
    captured(backend, world.batch("target_verify", [1] * 3, [4] * 3, ragged=True)[0])
    for prefixes, counts in (([126, 254, 2], [1, 8, 3]), ([63, 511], [5, 2]), ([100, 7, 9], [0, 0, 12])):
        batch, rows = world.batch("target_verify", prefixes, counts, ragged=True)
        pads = world.pad_rows(12 - sum(counts), request=0 if len(prefixes) < 3 else 2)
        check_fields(replayed(backend, batch), world, rows.then(pads), pages=4)


def test_draft_extend_is_uniform_and_its_pad_rows_lie_before_position_0(make_world, backend_class, check_fields):
    world = make_world([600] * 3, context=CONTEXT)
    backend = backend_class(world.runner)
    backend.init_cuda_graph_state(3, 12)
    metadata = captured(backend, world.batch("draft_extend", [1] * 3, [4] * 3)[0])
    before = addresses(metadata)
    assert not any(name.startswith(("c4_", "c128_")) for name in before)
    for prefixes in ([64, 96], [252, 124, 508], [0]):
        batch, rows = world.batch("draft_extend", prefixes, [4] * len(prefixes))
        core = replayed(backend, batch)
        for _ in range(3 - len(prefixes)):
            pads = world.pad_rows(4)
            pads.position[:] = [-3, -2, -1, 0]
            rows = rows.then(pads)
        check_fields(core, world, rows, pages=4, compress=False)
        assert addresses(backend.forward_metadata) == before


def test_a_ragged_draft_extend_does_not_fit_a_graph(make_world, backend_class):
    world = make_world([600] * 2, context=CONTEXT)
    backend = backend_class(world.runner)
    backend.init_cuda_graph_state(2, 8)
    captured(backend, world.batch("draft_extend", [1] * 2, [4] * 2)[0])
    batch, _ = world.batch("draft_extend", [64, 96], [1, 4])
    with pytest.raises(AssertionError, match="1 rows in a graph; supported: 4 rows a request"):
        backend.init_forward_metadata_out_graph(batch)


def test_rows_a_request_follow_from_the_graph_state(make_world, backend_class):
    world = make_world([600] * 2, context=CONTEXT)
    backend = backend_class(world.runner)
    for max_bs, tokens, want in ((4, 16, 4), (3, 8, 2), (2, 1, 1), (0, 0, 1)):
        backend.init_cuda_graph_state(max_bs, tokens)
        assert backend.graph_state.draft_extend_rows == want


def test_after_warmup_the_capture_upgrades_again_with_fresh_schedulers(make_world, backend_class):
    world = make_world([600] * 2, context=CONTEXT)
    backend = backend_class(world.runner)
    backend.init_cuda_graph_state(2, 2)
    batch, _ = world.batch("decode", [0, 0])
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    raw = backend.forward_metadata
    backend.init_forward_metadata_in_graph(batch)
    warm = backend.forward_metadata.core_attn_metadata
    scheduler = warm.c4_flashmla_metadata
    backend.on_after_cuda_graph_warmup()
    assert backend.forward_metadata is raw
    assert warm.c4_flashmla_metadata is not scheduler
    backend.init_forward_metadata_in_graph(batch)
    assert backend.forward_metadata.core_attn_metadata is warm


def test_c4_selection_is_reset_by_every_in_graph_step(make_world, backend_class, device):
    world = make_world([600] * 2, context=CONTEXT)
    backend = backend_class(world.runner)
    backend.init_cuda_graph_state(2, 2)
    batch, _ = world.batch("decode", [500, 17])
    core = captured(backend, batch).core_attn_metadata
    replayed(backend, batch)
    backend.write_c4_selection(torch.arange(512, dtype=torch.int32, device=device).expand(2, 512))
    assert (core.c4_sparse_page_indices >= 0).sum().item() == 501 // 4 + 18 // 4
    replayed(backend, batch)
    assert (core.c4_sparse_page_indices == -1).all()


def test_eager_steps_between_replays_leave_the_captured_tensors_alone(make_world, backend_class, check_fields):
    world = make_world([600] * 2, context=CONTEXT)
    backend = backend_class(world.runner)
    backend.init_cuda_graph_state(2, 2)
    batch, rows = world.batch("decode", [500, 17])
    metadata = captured(backend, batch)
    before = addresses(metadata)
    replayed(backend, batch)
    eager, eager_rows = world.batch("extend", [5], [9])
    backend.init_forward_metadata(eager)
    check_fields(backend.forward_metadata.core_attn_metadata, world, eager_rows, pages=1)
    check_fields(metadata.core_attn_metadata, world, rows, pages=4)
    check_fields(replayed(backend, batch), world, rows, pages=4)
    assert addresses(backend.forward_metadata) == before


def test_a_graph_of_no_rows(make_world, backend_class):
    world = make_world([600], context=CONTEXT)
    backend = backend_class(world.runner)
    backend.init_cuda_graph_state(0, 0)
    batch, _ = world.batch("decode", [])
    assert captured(backend, batch).core_attn_metadata.rows == 0
    assert replayed(backend, batch).rows == 0


@pytest.mark.parametrize("counts", [(2, 2, 2), (1, 4, 0)])
def test_a_recorded_ragged_verify_step_follows_its_inputs(make_world, backend_class, draw, device, counts):
    """The matrix captures uniform verify only; here one graph replays other row counts, equal to eager bit for bit."""
    from dsv4_matrix.modes.capture import capture

    world = make_world([300] * 3)
    backend, eager = backend_class(world.runner), backend_class(world.runner)
    for one in (backend, eager):
        one.set_key_buffer(world.runner.req_to_token[:, :300].reshape(-1).long(), draw_once(900, device))
    static, _ = world.batch("target_verify", [1] * 3, [2] * 3, ragged=True, on_host=False)
    static.out_cache_loc.zero_()
    q, sink, k = draw(6, 16, 512), draw(16, dtype=torch.float32), draw(6, 512)
    backend.init_cuda_graph_state(3, 6)
    backend.init_forward_metadata_out_graph(static, in_capture=True)

    def step():
        backend.init_forward_metadata_in_graph(static)
        backend.store_kv(static, k)
        return (backend.forward(q, static, 0, sink),)

    graph = capture(step, after_warmup=backend.on_after_cuda_graph_warmup, device=device)
    live, _ = world.batch("target_verify", [126, 254, 2], counts, ragged=True)
    rows = sum(counts)
    for name in ("seq_lens", "req_pool_indices", "verify_lens"):
        getattr(static, name).copy_(getattr(live, name))
    static.out_cache_loc[:rows] = live.out_cache_loc
    backend.init_forward_metadata_out_graph(static)
    graph.replay()
    eager.init_forward_metadata(live)
    eager.store_kv(live, k[:rows])
    out, lse = eager.forward(q[:rows], live, 0, sink)
    assert torch.equal(graph.outputs[0][0][:rows], out)
    assert torch.equal(graph.outputs[0][1][:rows], lse)
    for name, buffer in backend.kv_buffers().items():
        assert torch.equal(buffer, eager.kv_buffers()[name]), name


def draw_once(rows: int, device: str) -> torch.Tensor:
    return torch.randn(rows, 512, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
