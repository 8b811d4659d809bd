"""No request, no row: nothing is launched, nothing is written, outputs are empty; idle ranks do no harm."""

from __future__ import annotations

import pytest
import torch

MODES = ("decode", "extend", "target_verify", "draft_extend", "idle")


def hashes(backend) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in backend.kv_buffers().items()}


@pytest.fixture
def no_launch(monkeypatch):
    """Launching any kernel of the backend's own raises."""
    from dsv4_triton import attention, metadata_kernels, sparse_prefill, store

    class Refuses:
        def __getitem__(self, grid):
            raise AssertionError(f"a kernel was launched over grid {grid}")

    for module, kernels in (
        (metadata_kernels, ("_metadata_kernel", "_c4_selection_kernel")),
        (sparse_prefill, ("_combine_kernel",)),
        (store, ("_pack_and_store", "_unpack")),
        (attention, tuple(name for name in ("attend", "attend_packed", "combine") if hasattr(attention, name))),
    ):
        for kernel in kernels:
            monkeypatch.setattr(module, kernel, Refuses())


@pytest.mark.parametrize("path", ["dense", "sparse"])
@pytest.mark.parametrize("mode", MODES)
def test_no_request(make_world, backend_class, draw, device, no_launch, mode, path):
    world = make_world([300], prefill_path=path)
    backend = backend_class(world.runner)
    before = hashes(backend)
    batch, _ = world.batch(mode, [])
    backend.init_forward_metadata(batch)
    backend.store_kv(batch, draw(0, 512))
    ratios = (0,) if mode == "draft_extend" else (0, 4, 128)
    for ratio in ratios:
        if ratio:
            backend.store_compressed(batch, ratio, draw(0, 512))
        if ratio == 4:
            backend.write_c4_selection(torch.zeros(0, 512, dtype=torch.int32, device=device))
        out, lse = backend.forward(draw(0, 16, 512), batch, ratio, draw(16, dtype=torch.float32))
        assert (out.shape, out.dtype) == ((0, 16, 512), torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((0, 16), torch.float32)
    for name, buffer in backend.kv_buffers().items():
        assert torch.equal(buffer, before[name])


def test_the_launch_guard_works(make_world, backend_class, no_launch):
    world = make_world([300])
    batch, _ = world.batch("decode", [3])
    with pytest.raises(AssertionError, match="a kernel was launched"):
        backend_class(world.runner).init_forward_metadata(batch)


@pytest.mark.parametrize(("mode", "actual"), [("idle", None), ("decode", "idle"), ("extend", "idle")])
def test_an_idle_batch_with_leftovers_is_one_dummy_token_a_request(
    make_world, backend_class, check_fields, mode, actual
):
    """What the last batch left in the tensors (lengths, request rows, locations) is not read."""
    world = make_world([300, 300])
    batch, _ = world.batch("decode", [255, 127])
    batch.forward_mode, batch.actual_forward_mode = mode, actual
    backend = backend_class(world.runner)
    backend.init_forward_metadata(batch)
    check_fields(backend.forward_metadata.core_attn_metadata, world, world.pad_rows(2), pages=1)


@pytest.mark.parametrize(("mode", "actual"), [("idle", None), ("decode", "idle")])
@pytest.mark.parametrize("after_a_live_batch", [False, True])
def test_an_idle_step_without_metadata_of_its_own(make_world, backend_class, draw, mode, actual, after_a_live_batch):
    """With speculation on, an engine skips the metadata of an idle rank and still calls the rest of the step."""
    world = make_world([300, 300])
    backend = backend_class(world.runner)
    live, _ = world.batch("decode", [255, 127])
    if after_a_live_batch:
        backend.init_forward_metadata(live)
    kept = hashes(backend)
    live.forward_mode, live.actual_forward_mode = mode, actual
    backend.store_kv(live, draw(2, 512))
    for ratio in (4, 128):
        backend.store_compressed(live, ratio, draw(2, 512))
    for ratio in (0, 4, 128):
        out, lse = backend.forward(draw(2, 16, 512), live, ratio, draw(16, dtype=torch.float32))
        assert (out == 0).all()
        assert torch.isposinf(lse).all()
    for name, buffer in backend.kv_buffers().items():
        assert torch.equal(buffer, kept[name])


def test_a_live_batch_after_an_idle_one(make_world, backend_class, check_fields):
    world = make_world([300, 300])
    backend = backend_class(world.runner)
    batch, rows = world.batch("decode", [255, 127])
    idle, _ = world.batch("idle", [])
    for _ in range(2):
        backend.init_forward_metadata(batch)
        check_fields(backend.forward_metadata.core_attn_metadata, world, rows, pages=1)
        backend.init_forward_metadata(idle)
        assert backend.forward_metadata.core_attn_metadata.rows == 0
