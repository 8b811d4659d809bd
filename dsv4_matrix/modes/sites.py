"""The call sites of probes: each brings a backend to where a refusal is due, and returns the call that must refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from dsv4_matrix.modes.rig import Rig
from dsv4_matrix.protocol import ForwardBatch, ForwardMode

Refused = Callable[[], object]


@dataclass(frozen=True)
class Arranged:
    """A backend brought to where a refusal is due.

    Attributes:
        calls: in order; the first that raises is the one that refuses.
        pools: its cache bytes now; none before it is built.
    """

    calls: tuple[Refused, ...]
    pools: Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Site:
    """A call site of one call.

    Attributes:
        call: what is called, for messages.
        arrange: makes everything that comes before the call, which must succeed, and returns the call.
        builds: the call is the backend's own construction, so that there is no backend before it.
        prefill_path: of the runner.
    """

    call: str
    arrange: Callable[[Rig], Refused]
    builds: bool = False
    prefill_path: str = "auto"

    def arranged(self, rig: Rig) -> Arranged:
        return Arranged((self.arrange(rig),), dict if self.builds else rig.backend.kv_buffers)


def _built_with(rig: Rig, **changed: object) -> Refused:
    runner = rig.with_runner(**changed)
    return lambda: rig.factory(runner)


def _multi_step(rig: Rig, num_steps: int) -> Refused:
    runner, ratio = rig.runner, rig.ratio
    return lambda: rig.factory.multi_step(runner, num_steps=num_steps, compress_ratio=ratio)


def _out_graph_extend(rig: Rig, *, in_capture: bool) -> Refused:
    backend, batch = rig.backend, rig.batch(ForwardMode.EXTEND, rows=2)
    backend.init_cuda_graph_state(batch.batch_size, len(batch.positions))
    return lambda: backend.init_forward_metadata_out_graph(batch, in_capture=in_capture)


def _attend(rig: Rig, batch: ForwardBatch, ratio: int, **changed: object) -> Refused:
    rows = len(batch.positions)
    q, sink = changed.get("q", rig.query(rows)), changed.get("sink", rig.sink)
    return lambda: rig.backend.forward(q, batch, ratio, sink)  # type: ignore[arg-type]


def _draft_extend(rig: Rig) -> Refused:
    batch = rig.batch(ForwardMode.DRAFT_EXTEND, rows=2)
    rig.backend.init_forward_metadata(batch)
    return _attend(rig, batch, rig.ratio)


def _captured_draft_extend(rig: Rig) -> Refused:
    backend, batch = rig.backend, rig.batch(ForwardMode.DRAFT_EXTEND, rows=2)
    backend.init_cuda_graph_state(batch.batch_size, len(batch.positions))
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    return _attend(rig, batch, rig.ratio)


def _decode(rig: Rig, ratio: int = 0, **changed: object) -> Refused:
    batch = rig.batch(ForwardMode.DECODE)
    rig.backend.init_forward_metadata(batch)
    return _attend(rig, batch, ratio, **changed)


def _unsupported_mode(rig: Rig) -> Refused:
    batch = rig.batch(ForwardMode.SPLIT_PREFILL, rows=2)
    return lambda: rig.backend.init_forward_metadata(batch)


def _uneven_lengths(rig: Rig) -> Refused:
    batch = rig.batch(ForwardMode.DECODE)
    backend, short = rig.backend, replace(batch, out_cache_loc=batch.out_cache_loc[:1])
    return lambda: backend.init_forward_metadata(short)


def _captured_decode(rig: Rig) -> ForwardBatch:
    """A decode graph prepared as for a capture; the batch that it holds."""
    backend, captured = rig.backend, rig.batch(ForwardMode.DECODE)
    backend.init_cuda_graph_state(captured.batch_size, captured.batch_size)
    backend.init_forward_metadata_out_graph(captured, in_capture=True)
    backend.init_forward_metadata_in_graph(captured)
    backend.on_after_cuda_graph_warmup()
    return captured


def _beyond_capture(rig: Rig) -> Refused:
    larger = rig.batch(ForwardMode.DECODE, requests=_captured_decode(rig).batch_size + 1)
    return lambda: rig.backend.init_forward_metadata_out_graph(larger)


def _beyond_context(rig: Rig) -> Refused:
    captured, longest = _captured_decode(rig), rig.runner.req_to_token.shape[1] + 1
    lengths = [longest] * captured.batch_size
    beyond = replace(captured, seq_lens=torch.full_like(captured.seq_lens, longest), seq_lens_cpu=lengths)
    return lambda: rig.backend.init_forward_metadata_out_graph(beyond)


def _store(rig: Rig) -> Refused:
    batch = rig.batch(ForwardMode.DECODE)
    rig.backend.init_forward_metadata(batch)
    rows = rig.rows(batch.batch_size, 512, dtype=torch.float32)
    return lambda: rig.backend.store_kv(batch, rows)


def _selection(rig: Rig) -> Refused:
    batch = rig.batch(ForwardMode.DECODE)
    rig.backend.init_forward_metadata(batch)
    raw = torch.full((batch.batch_size, rig.runner.index_topk // 2), -1, dtype=torch.int32, device=rig.device)
    return lambda: rig.backend.write_c4_selection(raw)


def _extra_pool(rig: Rig) -> Refused:
    batch = rig.batch(ForwardMode.DECODE)
    rig.backend.init_forward_metadata(batch)
    return lambda: rig.backend.store_compressed(batch, 0, rig.rows(batch.batch_size, 512))


#: By the name that matrix.yaml uses; ``dsv4_matrix.declaration.sites`` has the same names without torch, and the one of
#: ``own_step``.
SITES: Mapping[str, Site] = MappingProxyType(
    {
        "capture-extend": Site(
            "init_forward_metadata_out_graph(EXTEND, in_capture=True)", lambda b: _out_graph_extend(b, in_capture=True)
        ),
        "replay-extend": Site(
            "init_forward_metadata_out_graph(EXTEND)", lambda b: _out_graph_extend(b, in_capture=False)
        ),
        "draft-extend-compressed": Site("forward(compress_ratio) of a DRAFT_EXTEND batch", _draft_extend),
        "capture-draft-extend-compressed": Site(
            "forward(compress_ratio) of a captured DRAFT_EXTEND batch", _captured_draft_extend
        ),
        "tree-verify": Site(
            "the backend with speculative_eagle_topk=2", lambda b: _built_with(b, speculative_eagle_topk=2), True
        ),
        "multi-token-prediction-tree": Site(
            "the backend with speculative_eagle_topk=4",
            lambda b: _built_with(b, speculative_eagle_topk=4, speculative_num_draft_tokens=8),
            True,
        ),
        "draft-runner-compressed": Site(
            "multi_step(num_steps=3, compress_ratio)", lambda b: _multi_step(b, num_steps=3), True
        ),
        # A draft-extend runner makes one forward, as a chain of two steps does.
        "draft-extend-runner-compressed": Site(
            "multi_step(num_steps=2, compress_ratio)", lambda b: _multi_step(b, num_steps=2), True
        ),
        "page-size": Site("the backend with page_size=64", lambda b: _built_with(b, page_size=64), True),
        "head-dim": Site("the backend with head_dim=576", lambda b: _built_with(b, head_dim=576), True),
        "swa-page-size": Site("the backend with swa_page_size=64", lambda b: _built_with(b, swa_page_size=64), True),
        "num-heads": Site("the backend with num_heads=24", lambda b: _built_with(b, num_heads=24), True),
        "index-topk": Site("the backend with index_topk=2048", lambda b: _built_with(b, index_topk=2048), True),
        "context-parallel": Site(
            "the backend with context_parallel_size=2", lambda b: _built_with(b, context_parallel_size=2), True
        ),
        "unknown-ratio": Site("forward(compress_ratio=2)", lambda b: _decode(b, ratio=2)),
        "unsupported-forward-mode": Site("init_forward_metadata(SPLIT_PREFILL)", _unsupported_mode),
        "uneven-lengths": Site("init_forward_metadata of 2 requests and 1 location", _uneven_lengths),
        "beyond-context": Site("init_forward_metadata_out_graph of a request beyond the table", _beyond_context),
        "graph-beyond-capture": Site("init_forward_metadata_out_graph of a larger batch", _beyond_capture),
        "attn-sink-missing": Site("forward(attn_sink=None)", lambda b: _decode(b, sink=None)),
        "sink-dtype": Site("forward(attn_sink bf16)", lambda b: _decode(b, sink=b.sink.to(torch.bfloat16))),
        "q-dtype": Site("forward(q fp16)", lambda b: _decode(b, q=b.query(2, dtype=torch.float16))),
        "q-width": Site("forward(q 576 wide)", lambda b: _decode(b, q=b.query(2, width=576))),
        "k-dtype": Site("store_kv(k fp32)", _store),
        "selection-width": Site("write_c4_selection of half the width", _selection),
        "extra-pool-of-ratio-0": Site("store_compressed(compress_ratio=0)", _extra_pool),
    }
)
