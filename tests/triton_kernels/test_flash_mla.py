"""The drop-in call: random shapes against the oracle, FlashMLA's own conventions, and every refusal."""

from __future__ import annotations

import inspect
import math
import random
from zlib import crc32

import pytest
import torch
from dsv4_triton import attention, flash_mla_with_kvcache, get_mla_metadata
from torch.utils._python_dispatch import TorchDispatchMode

ON_GPU = torch.cuda.is_available()
SAMPLES = 300 if ON_GPU else 40
PAGES = (1, 2, 3, 7, 64, 100, 128, 255, 256, 576)
WIDTHS = (0, 1, 63, 64, 65, 133, 192, 640, 641, 1152)
LONG = (4096, 2049, 4095)


def keys_of(draw: random.Random, generator: torch.Generator, make_keys, width: int):
    """A pool of random page size, partly live, and indices that name live slots and junk."""
    page = draw.choice([*PAGES, draw.randint(1, 576)])
    pages = draw.randint(1, max(1, 700 // page))
    live = torch.randperm(pages * page, generator=generator)[: max(1, pages * page * 2 // 3)]
    stride = page * 584 + 8 * draw.choice([0, 0, 1, 2, 50])
    keys = make_keys(torch.randn(len(live), 512, generator=generator).bfloat16(), live, pages, page, stride)
    junk = torch.tensor([-1, -7, -(2**31), 2**31 - 1, pages * page])

    def choose(rows: int, s_q: int) -> torch.Tensor:
        at = torch.randint(len(live), (rows, s_q, width), generator=generator)
        bad = junk[torch.randint(len(junk), at.shape, generator=generator)]
        hole = torch.rand(at.shape, generator=generator) < draw.choice([0.0, 0.3, 1.0 if width < 64 else 0.6])
        return torch.where(hole, bad, live[at]).int()

    return keys, choose


def lengths_of(draw: random.Random, batch: int, width: int) -> torch.Tensor | None:
    if draw.random() < 0.3:
        return None
    edges = [0, 1, width - 1, width, width + 5, -3, width // 2]
    return torch.tensor([draw.choice([*edges, draw.randint(0, width)]) for _ in range(batch)], dtype=torch.int32)


@pytest.mark.parametrize("sample", range(SAMPLES))
def test_random_calls_agree_with_the_oracle(sample, make_keys, oracle, check, device):
    seed = crc32(f"flash-mla-sample-{sample}".encode())
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    heads = draw.choice([16, 32, 64, 128]) if ON_GPU else 16
    batch, s_q = (draw.randint(1, 5), draw.randint(1, 3)) if ON_GPU else (draw.randint(1, 2), draw.randint(1, 2))
    width = draw.choice([*WIDTHS, *LONG, draw.randint(0, 4096)]) if ON_GPU else draw.choice(WIDTHS)
    if not ON_GPU and (sample % 13 == 0 or width > 640):
        batch = s_q = 1
        width = LONG[sample // 13 % 3] if sample % 13 == 0 else width
    main, choose = keys_of(draw, generator, make_keys, width)
    indices, lengths = choose(batch, s_q), lengths_of(draw, batch, width)
    lists = [(main.values, indices, lengths)]
    extra = {}
    if draw.random() < 0.5:
        extra_width = draw.choice(WIDTHS[:-2] if ON_GPU else WIDTHS[:-4])
        more, choose = keys_of(draw, generator, make_keys, extra_width)
        extra_indices, extra_lengths = choose(batch, s_q), lengths_of(draw, batch, extra_width)
        lists.append((more.values, extra_indices, extra_lengths))
        extra = {
            "extra_k_cache": more.view,
            "extra_indices_in_kvcache": extra_indices.to(device),
            "extra_topk_length": None if extra_lengths is None else extra_lengths.to(device),
        }
    q = torch.randn(batch, s_q, heads, draw.choice([512, 576, 640]), generator=generator).bfloat16().to(device)
    q = q[..., :512]
    sink = draw.choice([None, torch.randn(heads, generator=generator).to(device)])
    scale = draw.choice([None, 512**-0.5, 0.01, 0.2])
    out = draw.choice([None, torch.full((batch, s_q, heads, 512), math.nan, dtype=torch.bfloat16, device=device)])
    got, lse = flash_mla_with_kvcache(
        q,
        main.view.view(draw.choice([torch.uint8, torch.int8, torch.float8_e4m3fn])),
        None, None, 512, get_mla_metadata()[0], None, scale, False, True,
        indices=indices.to(device), attn_sink=sink,
        topk_length=None if lengths is None else lengths.to(device), out=out, **extra,
    )  # fmt: skip
    assert out is None or got is out
    assert got.shape == (batch, s_q, heads, 512)
    assert lse.shape == (batch, heads, s_q)
    rows = [
        (values, i.flatten(0, 1).to(device), None if n is None else n.repeat_interleave(s_q).to(device))
        for values, i, n in lists
    ]
    want = oracle(q.flatten(0, 1), rows, sink, 512**-0.5 if scale is None else scale)
    check((got.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)), want)


def test_the_call_is_flash_mlas():
    parameters = list(inspect.signature(flash_mla_with_kvcache).parameters.values())
    assert [p.name for p in parameters] == [
        "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits",
        "softmax_scale", "causal", "is_fp8_kvcache", "indices", "attn_sink", "extra_k_cache",
        "extra_indices_in_kvcache", "topk_length", "extra_topk_length", "out",
    ]  # fmt: skip
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == ["out"]
    metadata, num_splits = get_mla_metadata(1, 2, three=3)
    assert metadata is not None
    assert num_splits is None


@pytest.fixture
def call(random_keys, generator, device):
    """A valid call's arguments by name."""
    main, slots = random_keys(2, 64)
    extra, extra_slots = random_keys(8, 2)
    return {
        "q": torch.randn(2, 1, 16, 512, generator=generator).bfloat16().to(device),
        "k_cache": main.view,
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": None,
        "is_fp8_kvcache": True,
        "indices": slots[:128].view(2, 1, 64).to(device),
        "topk_length": torch.tensor([64, 9], dtype=torch.int32, device=device),
        "attn_sink": torch.zeros(16, device=device),
        "extra_k_cache": extra.view,
        "extra_indices_in_kvcache": extra_slots[:16].view(2, 1, 8).to(device),
        "extra_topk_length": torch.tensor([8, 8], dtype=torch.int32, device=device),
    }


REFUSALS = {
    "block_table": (lambda c: {"block_table": c["indices"]}, NotImplementedError, "block_table must be None"),
    "cache_seqlens": (lambda c: {"cache_seqlens": c["topk_length"]}, NotImplementedError, "cache_seqlens must be None"),
    "num_splits": (lambda c: {"num_splits": c["topk_length"]}, NotImplementedError, "num_splits must be None"),
    "causal": (lambda _: {"causal": True}, NotImplementedError, "causal must be False"),
    "not fp8": (lambda _: {"is_fp8_kvcache": False}, NotImplementedError, "is_fp8_kvcache must be True"),
    "head_dim_v": (lambda _: {"head_dim_v": 256}, ValueError, "head_dim_v must be 512, got 256"),
    "dense": (lambda _: {"indices": None}, NotImplementedError, "indices must be given"),
    "q dtype": (lambda c: {"q": c["q"].half()}, TypeError, "q must be a bf16 tensor, got torch.float16"),
    "q rank": (lambda c: {"q": c["q"][0]}, ValueError, r"q must be \[b, s_q, h, 512\]"),
    "q width": (lambda c: {"q": c["q"][..., :256]}, ValueError, r"q must be \[b, s_q, h, 512\]"),
    "q last stride": (
        lambda c: {"q": c["q"].transpose(2, 3).contiguous().transpose(2, 3)}, ValueError, "contiguous last dimension",
    ),
    "8 heads": (lambda c: {"q": c["q"][:, :, :8]}, ValueError, "q has 8 heads; supported are 16, 32, 64, 128"),
    "24 heads": (lambda c: {"q": c["q"].repeat(1, 1, 2, 1)[:, :, :24]}, ValueError, "q has 24 heads"),
    "cache dtype": (lambda c: {"k_cache": c["k_cache"].float()}, TypeError, "k_cache must be a uint8"),
    "cache rank": (lambda c: {"k_cache": c["k_cache"].squeeze(2)}, ValueError, "k_cache must be"),
    "cache width": (lambda c: {"k_cache": c["k_cache"][..., :576]}, ValueError, "k_cache must be"),
    "cache rows apart": (lambda c: {"k_cache": c["k_cache"][:, ::2]}, ValueError, "dense inside a page"),
    "cache page stride": (
        lambda c: {"k_cache": c["k_cache"].new_zeros(4 * 1172).as_strided((4, 2, 1, 584), (1172, 584, 584, 1))},
        ValueError, "multiple of 8 bytes",
    ),
    "cache overlap": (
        lambda c: {"k_cache": c["k_cache"].as_strided((2, 64, 1, 584), (584, 584, 584, 1))},
        ValueError, "at least 37376",
    ),
    "indices dtype": (lambda c: {"indices": c["indices"].long()}, TypeError, "indices must be an int32 tensor"),
    "indices rank": (lambda c: {"indices": c["indices"][:, 0]}, ValueError, r"indices must be \[2, 1, width\]"),
    "indices batch": (lambda c: {"indices": c["indices"][:1]}, ValueError, r"indices must be \[2, 1, width\]"),
    "length dtype": (lambda c: {"topk_length": c["topk_length"].long()}, TypeError, "topk_length must be an int32"),
    "length shape": (lambda c: {"topk_length": c["topk_length"][:1]}, ValueError, r"topk_length must be \[2\]"),
    "sink dtype": (lambda c: {"attn_sink": c["attn_sink"].bfloat16()}, TypeError, "attn_sink must be an fp32 tensor"),
    "sink shape": (lambda c: {"attn_sink": c["attn_sink"][:8]}, ValueError, r"attn_sink must be contiguous \[16\]"),
    "extra cache alone": (lambda _: {"extra_indices_in_kvcache": None}, ValueError, "extra_k_cache and extra_ind"),
    "extra indices alone": (lambda _: {"extra_k_cache": None}, ValueError, "come together"),
    "extra length alone": (
        lambda _: {"extra_k_cache": None, "extra_indices_in_kvcache": None}, ValueError, "extra_topk_length only with",
    ),
    "extra length shape": (
        lambda c: {"extra_topk_length": c["topk_length"][:1]}, ValueError, r"extra_topk_length must be \[2\]",
    ),
    "out dtype": (lambda c: {"out": torch.empty_like(c["q"], dtype=torch.float32)}, TypeError, "out must be a bf16"),
    "out shape": (lambda c: {"out": torch.empty_like(c["q"])[:1]}, ValueError, r"out must be \(2, 1, 16, 512\)"),
    "device": (lambda c: {"indices": c["indices"].to("meta")}, ValueError, "indices must be"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_unsupported_arguments_are_named_before_anything_runs(name, call, monkeypatch):
    change, error, words = REFUSALS[name]
    flash_mla_with_kvcache(**call)  # the call is valid but for the change
    monkeypatch.setattr(attention, "attend", None)
    with pytest.raises(error, match=words) as caught:
        flash_mla_with_kvcache(**(call | change(call)))
    assert "flash_mla_with_kvcache" in str(caught.value)


def test_optional_arguments_may_be_missing(call):
    for name in ("attn_sink", "topk_length", "extra_topk_length", "softmax_scale"):
        flash_mla_with_kvcache(**(call | {name: None}))
    without = {k: v for k, v in call.items() if not k.startswith("extra")}
    assert flash_mla_with_kvcache(**without)[0].shape == (2, 1, 16, 512)


class NoSync(TorchDispatchMode):
    """Raises where a tensor's value is read on the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_local_scalar_dense" in str(func):
            raise RuntimeError("a host sync")
        return func(*args, **(kwargs or {}))


def test_no_value_is_read_on_the_host(call):
    with pytest.raises(RuntimeError, match="a host sync"), NoSync():
        call["topk_length"].max().item()
    with NoSync():
        flash_mla_with_kvcache(**call)


@pytest.mark.skipif(not ON_GPU, reason="a CUDA graph needs a GPU")
def test_captured_calls_follow_their_inputs(call):
    eager = flash_mla_with_kvcache(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_mla_with_kvcache(**call)
    for _ in range(3):
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, eager[0])
        assert torch.equal(lse, eager[1])
    call["topk_length"].fill_(3)
    graph.replay()
    assert torch.equal(out, flash_mla_with_kvcache(**call)[0])
    assert not torch.equal(out, eager[0])
