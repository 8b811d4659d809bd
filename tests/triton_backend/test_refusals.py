"""Every refusal: its type, what its message says, that no byte was written, and that the backend works afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

RUNNERS = [
    ({"page_size": 128}, AssertionError, r"page_size is 128, the system hardcodes page_size=256"),
    ({"page_size": None}, AssertionError, r"hardcodes page_size=256"),
    ({"head_dim": 576}, AssertionError, r"head_dim is 576; supported: 512"),
    ({"swa_page_size": 64}, AssertionError, r"swa_page_size is 64; supported: 256 or 128"),
    ({"num_heads": 8}, ValueError, r"num_heads is 8; supported: 16, 32, 64 or 128"),
    ({"num_heads": 96}, ValueError, r"num_heads is 96"),
    ({"index_topk": 2048}, AssertionError, r"index_topk is 2048; supported: 512 or 1024"),
    ({"speculative_eagle_topk": 2}, AssertionError, r"MTP Topk > 1 not supported"),
    ({"speculative_eagle_topk": 4}, AssertionError, r"speculative_eagle_topk is 4"),
    ({"context_parallel_size": 2}, NotImplementedError, r"context_parallel_size is 2"),
    ({"prefill_path": "fast"}, ValueError, r"prefill_path is 'fast'; supported: auto, dense or sparse"),
    ({"req_to_token": None}, AssertionError, r"req_to_token is None"),
    ({"req_to_token": torch.zeros(4, dtype=torch.int32)}, AssertionError, r"req_to_token is int32 \[4\]"),
    ({"req_to_token": torch.zeros(4, 4)}, AssertionError, r"req_to_token is float32"),
    ({"full_to_swa_index_mapping": torch.zeros(4, dtype=torch.int32)}, AssertionError, r"mapping is int32"),
    ({"num_pages": 0}, AssertionError, r"num_pages is 0"),
]


@pytest.mark.parametrize(
    ("change", "error", "match"), RUNNERS, ids=[next(iter(c)) + str(i) for i, (c, *_) in enumerate(RUNNERS)]
)
def test_runners_that_are_not_supported(make_world, backend_class, change, error, match):
    world = make_world([300])
    backend_class(world.runner)
    with pytest.raises(error, match=match) as caught:
        backend_class(replace(world.runner, **change))
    assert caught.type is error
    assert str(caught.value).startswith("DSV4TritonBackend")


@pytest.mark.parametrize("ratio", [4, 128, 2])
def test_no_draft_runner_for_a_compressed_layer(make_world, backend_class, ratio):
    with pytest.raises(ValueError, match="draft layer is SWA-only"):
        backend_class.multi_step(make_world([300]).runner, num_steps=3, compress_ratio=ratio)


@pytest.mark.parametrize("num_steps", [0, 1, 6])
def test_draft_steps_that_are_no_chain(make_world, backend_class, num_steps):
    with pytest.raises(ValueError, match=f"num_steps is {num_steps}; supported: 2 to 5"):
        backend_class.multi_step(make_world([300]).runner, num_steps=num_steps)


def test_no_draft_runner_for_a_tree(make_world, backend_class):
    runner = replace(make_world([300]).runner, speculative_eagle_topk=4)
    with pytest.raises(AssertionError, match="Topk > 1"):
        backend_class.multi_step(runner, num_steps=3)


class Refusing:
    """A backend with a working decode step behind it, which must work as before once it has refused."""

    def __init__(self, world, backend) -> None:
        self.world, self.backend = world, backend
        device, generator = world.runner.device, torch.Generator().manual_seed(1)
        history, self.k, self.q = (
            torch.randn(*shape, generator=generator).bfloat16().to(device)
            for shape in ((600, 512), (2, 512), (2, 16, 512))
        )
        self.sink = torch.randn(16, generator=generator).to(device)
        backend.set_key_buffer(world.runner.req_to_token[:, :300].reshape(-1).long(), history)
        self.want = self.step()

    def step(self):
        batch, _ = self.world.batch("decode", [255, 127])
        backend = self.backend
        backend.init_forward_metadata(batch)
        backend.store_kv(batch, self.k)
        for ratio in (4, 128):
            backend.store_compressed(batch, ratio, self.k)
        backend.write_c4_selection(torch.zeros(2, 512, dtype=torch.int32, device=self.q.device))
        return [backend.forward(self.q, batch, ratio, self.sink)[0] for ratio in (0, 4, 128)]

    def refuses(self, error, match, call) -> None:
        before = {name: buffer.clone() for name, buffer in self.backend.kv_buffers().items()}
        with pytest.raises(error, match=match) as caught:
            call()
        assert caught.type is error
        for name, buffer in self.backend.kv_buffers().items():
            assert torch.equal(buffer, before[name]), f"{name} was written before the refusal"


@pytest.fixture(scope="module")
def one_backend(named_world, backend_class):
    world = named_world("refusing", [300, 300])
    return Refusing(world, backend_class(world.runner))


@pytest.fixture
def refusing(one_backend, monkeypatch):
    refusing = one_backend
    monkeypatch.setattr(refusing.backend, "graph_state", None)
    yield refusing
    monkeypatch.undo()
    for got, want in zip(refusing.step(), refusing.want, strict=True):
        assert torch.equal(got, want), "the backend must be usable after its refusals"


@pytest.mark.parametrize("mode", ["split_prefill", "mixed", ""])
def test_forward_modes_without_metadata(refusing, mode):
    batch, _ = refusing.world.batch("decode", [1, 2])
    batch.forward_mode = mode
    refusing.refuses(
        NotImplementedError, f"unsupported forward_mode={mode}", lambda: refusing.backend.init_forward_metadata(batch)
    )


@pytest.mark.parametrize("in_capture", [True, False])
@pytest.mark.parametrize("mode", ["extend", "split_prefill"])
def test_forward_modes_without_a_graph_bucket(refusing, mode, in_capture):
    batch, _ = refusing.world.batch("extend", [1, 2], [3, 4])
    batch.forward_mode = mode
    for prepare in (lambda: None, lambda: refusing.backend.init_cuda_graph_state(2, 8)):
        prepare()
        refusing.refuses(
            NotImplementedError,
            f"unsupported forward_mode={mode}",
            lambda: refusing.backend.init_forward_metadata_out_graph(batch, in_capture=in_capture),
        )


def test_graph_without_state(refusing):
    batch, _ = refusing.world.batch("decode", [1, 2])
    refusing.refuses(
        RuntimeError,
        "call init_cuda_graph_state first",
        lambda: refusing.backend.init_forward_metadata_out_graph(batch),
    )


def test_graphs_beyond_the_capture(refusing):
    backend, world = refusing.backend, refusing.world
    backend.init_cuda_graph_state(2, 4)
    one, _ = world.batch("decode", [1])
    three, _ = world.batch("decode", [1, 2, 3], requests=[0, 1, 1])
    too_many_rows, _ = world.batch("target_verify", [1, 2], [3, 3])
    long = replace(one, out_cache_loc=world.int64([300, 301]))
    capacity = replace(one, seq_lens_cpu=[513])
    for batch, capture, match in (
        (three, True, "3 requests and 3 rows, beyond the capture"),
        (too_many_rows, True, "2 requests and 6 rows, beyond the capture"),
        (one, False, r"captured \(requests x rows\): none"),
        (long, True, "2 locations for 1 requests"),
        (capacity, True, "513 tokens; supported: up to 512"),
    ):
        refusing.refuses(
            AssertionError,
            match,
            lambda batch=batch, capture=capture: backend.init_forward_metadata_out_graph(batch, in_capture=capture),
        )
    refusing.refuses(AssertionError, "max_bs -1", lambda: backend.init_cuda_graph_state(-1, 4))
    backend.init_forward_metadata_out_graph(one, in_capture=True)
    two, _ = world.batch("decode", [1, 2])
    refusing.refuses(
        AssertionError, r"captured \(requests x rows\): 1 x 1", lambda: backend.init_forward_metadata_out_graph(two)
    )


def test_lengths_that_disagree(refusing, monkeypatch):
    world, backend = refusing.world, refusing.backend
    decode, _ = world.batch("decode", [1, 2])
    verify, _ = world.batch("target_verify", [1, 2], [3, 3])
    extend, _ = world.batch("extend", [1, 2], [3, 3])
    for batch, match in (
        (replace(decode, out_cache_loc=world.int64([300])), "2 requests and 1 locations"),
        (replace(decode, req_pool_indices=world.int64([0])), "2 seq_lens and 1 req_pool_indices"),
        (replace(decode, seq_lens_cpu=[2, 513]), "513 tokens; supported: up to 512, the width of req_to_token"),
        (replace(verify, out_cache_loc=verify.out_cache_loc[:5]), "2 requests of 3 rows and 5 locations"),
        (replace(verify, verify_lens=world.int64([3])), "2 requests and 1 row counts"),
        (replace(extend, extend_seq_lens=None), "extend without extend_seq_lens"),
    ):
        refusing.refuses(AssertionError, match, lambda batch=batch: backend.init_forward_metadata(batch))
    monkeypatch.setattr(backend.runner, "speculative_num_draft_tokens", 0)
    silent = replace(verify, draft_token_num=None)
    refusing.refuses(AssertionError, "without draft_token_num", lambda: backend.init_forward_metadata(silent))
    floats = replace(decode, seq_lens=decode.seq_lens.float())
    refusing.refuses(TypeError, r"seq_lens is float32 \[2\]", lambda: backend.init_forward_metadata(floats))


@pytest.mark.parametrize("ratio", [4, 128])
def test_a_compressed_layer_under_draft_extend(refusing, ratio):
    backend, world = refusing.backend, refusing.world
    batch, _ = world.batch("draft_extend", [64, 96], [1, 1])
    for call in (
        lambda: backend.forward(refusing.q, batch, ratio, refusing.sink),
        lambda: backend.store_compressed(batch, ratio, refusing.k),
    ):
        backend.init_forward_metadata(batch)
        refusing.refuses(ValueError, "draft layer is SWA-only", call)
    backend.init_cuda_graph_state(2, 2)
    for call in (
        lambda: backend.forward(refusing.q, batch, ratio, refusing.sink),
        lambda: backend.store_compressed(batch, ratio, refusing.k),
    ):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend.init_forward_metadata_in_graph(batch)
        refusing.refuses(ValueError, "draft layer is SWA-only", call)


def test_a_selection_under_draft_extend(refusing):
    batch, _ = refusing.world.batch("draft_extend", [64, 96], [1, 1])
    refusing.backend.init_forward_metadata(batch)
    raw = torch.zeros(2, 512, dtype=torch.int32, device=refusing.q.device)
    refusing.refuses(ValueError, "draft layer is SWA-only", lambda: refusing.backend.write_c4_selection(raw))


@pytest.mark.parametrize("ratio", [1, 2, 3, 64, -4])
def test_unknown_ratios(refusing, ratio):
    backend = refusing.backend
    batch, _ = refusing.world.batch("decode", [255, 127])
    loc = batch.out_cache_loc
    for call in (
        lambda: backend.forward(refusing.q, batch, ratio, refusing.sink),
        lambda: backend.store_compressed(batch, ratio, refusing.k),
        lambda: backend.set_extra_key_buffer(ratio, loc, refusing.k),
    ):
        refusing.refuses(ValueError, f"invalid compress_ratio={ratio}; supported: 0, 4 and 128", call)


def test_ratio_0_has_no_compressed_pool(refusing):
    batch, _ = refusing.world.batch("decode", [255, 127])
    for call in (
        lambda: refusing.backend.store_compressed(batch, 0, refusing.k),
        lambda: refusing.backend.set_extra_key_buffer(0, batch.out_cache_loc, refusing.k),
    ):
        refusing.refuses(AssertionError, "compress_ratio 0 has no compressed pool", call)


def test_inputs_of_forward(refusing):
    q, sink = refusing.q, refusing.sink
    batch, _ = refusing.world.batch("decode", [255, 127])
    for error, match, bad_q, bad_sink in (
        (AssertionError, "attn_sink is missing", q, None),
        (TypeError, r"attn_sink is bfloat16 \[16\]; supported: float32 \[16\]", q, sink.bfloat16()),
        (ValueError, r"attn_sink is float32 \[15\]", q, sink[:15]),
        (TypeError, r"q is float32 \[2, 16, 512\]; supported: bf16", q.float(), sink),
        (ValueError, r"q is bfloat16 \[2, 16, 448\]", q[..., :448], sink),
        (ValueError, r"q is bfloat16 \[2, 8, 512\]", q[:, :8], sink),
        (ValueError, r"q is bfloat16 \[1, 2, 16, 512\]", q[None], sink),
        (ValueError, r"contiguous last dimension", q.transpose(1, 2).contiguous().transpose(1, 2), sink),
    ):
        refusing.refuses(error, match, lambda bad_q=bad_q, s=bad_sink: refusing.backend.forward(bad_q, batch, 0, s))


def test_rows_to_store(refusing):
    k, backend = refusing.k, refusing.backend
    batch, _ = refusing.world.batch("decode", [255, 127])
    for error, match, bad in (
        (AssertionError, r"the rows to store are float32 \[2, 512\]; supported: bf16", k.float()),
        (AssertionError, r"bfloat16 \[2, 448\]", k[:, :448]),
        (AssertionError, r"bfloat16 \[1, 512\]", k[:1]),
        (AssertionError, r"bfloat16 \[2, 1, 512\]", k[:, None]),
        (AssertionError, r"contiguous last dimension", k.t().contiguous().t()),
    ):
        for call in (
            lambda bad=bad: backend.store_kv(batch, bad),
            lambda bad=bad: backend.store_compressed(batch, 4, bad),
            lambda bad=bad: backend.set_key_buffer(batch.out_cache_loc, bad),
            lambda bad=bad: backend.set_extra_key_buffer(128, batch.out_cache_loc, bad),
        ):
            refusing.refuses(error, match, call)
    for loc, match in ((batch.out_cache_loc.float(), "loc is float32"), (batch.out_cache_loc[:, None], r"\[2, 1\]")):
        for call in (
            lambda loc=loc: backend.set_key_buffer(loc, k),
            lambda loc=loc: backend.set_extra_key_buffer(4, loc, k),
        ):
            refusing.refuses(AssertionError, match, call)


def test_selections(refusing):
    raw = torch.zeros(2, 512, dtype=torch.int32, device=refusing.q.device)
    for error, match, bad in (
        (AssertionError, r"the selection is int64 \[2, 512\]; supported: int32", raw.long()),
        (AssertionError, r"the selection is int32 \[2, 511\]", raw[:, :511]),
        (AssertionError, r"the selection is int32 \[512\]", raw[0]),
    ):
        refusing.refuses(error, match, lambda bad=bad: refusing.backend.write_c4_selection(bad))


def test_a_step_before_its_metadata(make_world, backend_class, draw):
    world = make_world([300, 300])
    backend = backend_class(world.runner)
    batch, _ = world.batch("decode", [255, 127])
    for call in (
        lambda: backend.forward(draw(2, 16, 512), batch, 0, draw(16, dtype=torch.float32)),
        lambda: backend.store_compressed(batch, 4, draw(2, 512)),
        lambda: backend.write_c4_selection(torch.zeros(2, 512, dtype=torch.int32)),
    ):
        with pytest.raises(RuntimeError, match=r"NoneType; expected DSV4Metadata. Call init_forward_metadata"):
            call()


def test_metadata_of_another_backend(refusing):
    backend = refusing.backend
    batch, _ = refusing.world.batch("decode", [255, 127])
    backend.init_forward_metadata(batch)
    sound = backend.forward_metadata
    backend.forward_metadata = replace(sound, core_attn_metadata=object())
    refusing.refuses(
        NotImplementedError, "ragged attention", lambda: backend.forward(refusing.q, batch, 0, refusing.sink)
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a second device is needed")
def test_tensors_on_another_device(refusing):
    batch, _ = refusing.world.batch("decode", [255, 127])
    refusing.refuses(
        ValueError, "q is on cpu", lambda: refusing.backend.forward(refusing.q.cpu(), batch, 0, refusing.sink)
    )


def test_the_device_check_itself():
    from dsv4_triton.refusals import check_device

    check_device("q", torch.zeros(1), torch.device("cpu"), "forward")
    with pytest.raises(ValueError, match=r"forward: q is on meta; supported: cpu"):
        check_device("q", torch.zeros(1, device="meta"), torch.device("cpu"), "forward")


def test_refusals_are_not_assert_statements():
    """``python -O`` drops assert statements, and with them a refusal."""
    import ast
    from pathlib import Path

    import dsv4_triton

    for path in Path(dsv4_triton.__file__).parent.rglob("*.py"):
        asserts = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
        assert not asserts, f"{path.name}: assert at lines {asserts}"
