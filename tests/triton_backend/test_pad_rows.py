"""Real rows are the same bits with any number of pad rows behind them, eager and captured; pads write nowhere."""

from __future__ import annotations

import pytest
import torch

from dsv4_matrix.modes.capture import capture
from dsv4_matrix.modes.padding import PadSpec, pad

#: Pad requests by mode; the interpreter takes a second for ten rows.
PADS = {"decode": [7], "target_verify": [1], "draft_extend": [1]}
PADS_ON_A_GPU = [0, 1, 7, 63]
PREFIXES = {"decode": ([127, 255], 1), "target_verify": ([126, 254], 2), "draft_extend": ([125, 253], 3)}
NAN = float("nan")


class Served:
    """A backend with a history, a step for it, and what a step leaves: answers of the real rows, and the caches."""

    def __init__(self, world, backend, mode: str, history: torch.Tensor) -> None:
        self.world, self.backend, self.mode = world, backend, mode
        self.ratios = (0,) if mode == "draft_extend" else (0, 4, 128)
        prefixes, self.width = PREFIXES[mode]
        self.batch, _ = world.batch(mode, prefixes, [self.width] * len(prefixes))
        backend.set_key_buffer(world.runner.req_to_token[:, :300].reshape(-1).long(), history)
        loc = world.runner.req_to_token[:, :300].reshape(-1).long()
        for ratio in (4, 128):
            last = loc % ratio == ratio - 1
            backend.set_extra_key_buffer(ratio, loc[last], history[last])

    def padded(self, pads: int):
        requests = self.batch.batch_size
        return pad(self.batch, PadSpec(requests, requests + pads, self.width))

    def attend(self, batch, q, k, raw, sink):
        self.backend.store_kv(batch, k)
        for ratio in self.ratios[1:]:
            self.backend.store_compressed(batch, ratio, k)
        if len(self.ratios) > 1:
            self.backend.write_c4_selection(raw)
        return tuple(self.backend.forward(q, batch, ratio, sink) for ratio in self.ratios)


@pytest.fixture
def served(make_world, backend_class, draw):
    history = draw(600, 512)
    world = make_world([300, 300])

    def make(mode: str) -> Served:
        return Served(world, backend_class(world.runner), mode, history)

    return make


@pytest.fixture
def inputs(draw, device):
    """``inputs(rows, pad rows)``: q, k, selection and sink; NaN and nonsense in pad rows, equal bits in real ones."""
    real = draw(6, 16, 512), draw(6, 512), draw(16, dtype=torch.float32)

    def make(rows: int, pads: int):
        q, k, sink = real
        q, k = (
            torch.cat([t[:rows], torch.full((pads, *t.shape[1:]), NAN, dtype=t.dtype, device=device)]) for t in (q, k)
        )
        raw = torch.arange(512, dtype=torch.int32, device=device).repeat(rows + pads, 1)
        raw[rows:] = torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32, device=device).repeat(256)
        return q, k, raw, sink

    return make


def run_eager(served: Served, pads: int, inputs):
    batch = served.padded(pads)
    served.backend.init_forward_metadata(batch)
    return served.attend(batch, *inputs)


def run_captured(served: Served, pads: int, inputs, device: str):
    backend, live = served.backend, served.padded(pads)
    static = served.padded(pads)
    for name, value in (("seq_lens", 1), ("req_pool_indices", 0), ("out_cache_loc", 0)):
        setattr(static, name, torch.full_like(getattr(live, name), value))
    backend.init_cuda_graph_state(len(live.seq_lens), len(live.out_cache_loc))
    backend.init_forward_metadata_out_graph(static, in_capture=True)

    def step():
        backend.init_forward_metadata_in_graph(static)
        return served.attend(static, *inputs)

    graph = capture(step, after_warmup=backend.on_after_cuda_graph_warmup, device=device)
    for name in ("seq_lens", "req_pool_indices", "out_cache_loc"):
        getattr(static, name).copy_(getattr(live, name))
    backend.init_forward_metadata_out_graph(static)
    graph.replay()
    return graph.outputs


@pytest.mark.parametrize("mode", PREFIXES)
def test_bits_of_real_rows(served, inputs, device, mode):
    alone = served(mode)
    rows = len(alone.batch.out_cache_loc)
    want = run_eager(alone, 0, inputs(rows, 0))
    assert all(bool(out.isfinite().all()) for out, _ in want)
    for pads in PADS_ON_A_GPU if device == "cuda" else PADS[mode]:
        given = inputs(rows, pads * alone.width)
        for way in ("eager", "captured"):
            other = served(mode)
            got = run_eager(other, pads, given) if way == "eager" else run_captured(other, pads, given, device)
            for answer, expected in zip(got, want, strict=True):
                for one, two in zip(answer, expected, strict=True):
                    assert torch.equal(one[:rows], two), f"{way}, {pads} pad requests"
            for name, buffer in other.backend.kv_buffers().items():
                assert torch.equal(buffer, alone.backend.kv_buffers()[name]), f"{way}, {pads} pad requests: {name}"


def test_a_pad_row_with_a_location_is_seen(served, inputs):
    """What the comparison of caches is for: NaN of a pad row in a slot of its own."""
    alone, other = served("decode"), served("decode")
    run_eager(alone, 0, inputs(2, 0))
    batch = other.padded(1)
    batch.out_cache_loc[-1] = other.world.runner.req_to_token[0, 200]
    other.backend.init_forward_metadata(batch)
    other.attend(batch, *inputs(2, 1))
    assert not torch.equal(other.backend.kv_buffers()["swa"], alone.backend.kv_buffers()["swa"])
