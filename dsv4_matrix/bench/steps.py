"""What surrounds attention in a decode step: metadata, storing keys, and the whole captured step against its parts.

Works through the backend protocol only, so that any backend can be measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from dsv4_matrix.bench.floors import Ceilings
from dsv4_matrix.bench.timing import captured, median_microseconds, replays, sample
from dsv4_matrix.modes.step import StepInputs, run_captured_step
from dsv4_matrix.protocol import AttentionBackend, BackendFactory, ForwardBatch, ForwardMode, RunnerConfig

PAGE, HEAD_DIM, HEADS, TOPK, TOKEN_BYTES = 256, 512, 64, 512, 584
REQUESTS, CONTEXT = 256, 4096
STORE_ROWS = (4096, 65536)


@dataclass(frozen=True)
class StepMeasurement:
    """A named quantity of the step: what it is, its value, its unit, and what it is held against."""

    name: str
    value: float
    unit: str
    goal: str


def decode_runner(device: torch.device) -> RunnerConfig:
    """256 requests of up to 4096 tokens in pages of their own."""
    pages_each = CONTEXT // PAGE
    pages = REQUESTS * pages_each + 1
    table = torch.zeros(REQUESTS + 1, CONTEXT, dtype=torch.int32, device=device)
    table[1:] = (PAGE + torch.arange(REQUESTS * CONTEXT, dtype=torch.int32, device=device)).view(REQUESTS, CONTEXT)
    mapping = torch.arange(pages * PAGE + 1, dtype=torch.int64, device=device)
    mapping[:PAGE] = 0
    mapping[-1] = -1
    return RunnerConfig(
        device=str(device),
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        page_size=PAGE,
        swa_page_size=PAGE,
        num_pages=pages,
        num_swa_pages=pages,
        req_to_token=table,
        full_to_swa_index_mapping=mapping,
        index_topk=TOPK,
        softmax_scale=HEAD_DIM**-0.5,
    )


def decode_batch(runner: RunnerConfig) -> ForwardBatch:
    """One new token of each request, at the end of its context."""
    device = runner.req_to_token.device
    lengths = torch.full((REQUESTS,), CONTEXT, dtype=torch.int64, device=device)
    rows = torch.arange(1, REQUESTS + 1, dtype=torch.int64, device=device)
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=rows,
        seq_lens=lengths,
        out_cache_loc=runner.req_to_token[rows, CONTEXT - 1].to(torch.int64),
        positions=lengths - 1,
        seq_lens_cpu=[CONTEXT] * REQUESTS,
    )


def measure_steps(factory: BackendFactory, ceilings: Ceilings, device: torch.device) -> list[StepMeasurement]:
    """Metadata of 256 decode rows, stores of 4096 and 65,536 rows, and a whole decode step of ratio 4."""
    runner = decode_runner(device)
    backend = factory(runner)
    batch = decode_batch(runner)
    return [*_metadata(backend, batch), *_stores(backend, runner, ceilings), *_step(backend, batch, device)]


def _metadata(backend: AttentionBackend, batch: ForwardBatch) -> list[StepMeasurement]:
    def work() -> None:
        backend.init_forward_metadata(batch)

    work()
    launches = device_launches(work)
    spent = median_microseconds(sample(work))
    return [
        StepMeasurement("metadata of 256 decode rows, launches", launches, "", "at most 3"),
        StepMeasurement("metadata of 256 decode rows", spent, "us", "at most 20"),
    ]


def _stores(backend: AttentionBackend, runner: RunnerConfig, ceilings: Ceilings) -> list[StepMeasurement]:
    """A store reads bf16 rows and their locations, and writes packed tokens: held against a copy of as many bytes."""
    found = []
    for rows in STORE_ROWS:
        keys = torch.randn(rows, HEAD_DIM, device=runner.req_to_token.device).bfloat16()
        order = torch.randperm(REQUESTS * CONTEXT, device=keys.device)[:rows]
        locations = runner.req_to_token[1:].reshape(-1)[order].to(torch.int64)
        spent = median_microseconds(sample(partial(backend.set_key_buffer, locations, keys), flush=True))
        moved = rows * (HEAD_DIM * 2 + 16 + TOKEN_BYTES)
        source = torch.empty(moved // 2, dtype=torch.uint8, device=keys.device)
        target = torch.empty_like(source)
        copied = median_microseconds(sample(partial(target.copy_, source), flush=True))
        found += [
            StepMeasurement(f"pack and store of {rows} rows", spent, "us", ""),
            StepMeasurement(
                f"pack and store of {rows} rows, speed of a copy", 100 * copied / spent, "%", "at least 70"
            ),
        ]
    return found


def _step(backend: AttentionBackend, batch: ForwardBatch, device: torch.device) -> list[StepMeasurement]:
    """A captured step of ratio 4 against the sum of its parts, each captured alone."""
    rows = batch.batch_size
    inputs = StepInputs(
        batch=batch,
        ratio=4,
        q=torch.randn(rows, HEADS, HEAD_DIM, device=device).bfloat16(),
        k=torch.randn(rows, HEAD_DIM, device=device).bfloat16(),
        compressed=torch.randn(rows, HEAD_DIM, device=device).bfloat16(),
        selection=torch.rand(rows, CONTEXT // 4, device=device).argsort(1)[:, :TOPK].to(torch.int32),
        sink=torch.zeros(HEADS, device=device),
    )
    assert inputs.compressed is not None and inputs.selection is not None  # noqa: PT018 - for the type checker
    compressed, selection = inputs.compressed, inputs.selection
    backend.init_cuda_graph_state(rows, rows)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    whole = captured(lambda: run_captured_step(backend, inputs))
    parts: dict[str, Callable[[], object]] = {
        "metadata": lambda: backend.init_forward_metadata_in_graph(batch),
        "store": lambda: backend.store_kv(batch, inputs.k),
        "compressed store": lambda: backend.store_compressed(batch, 4, compressed),
        "selection": lambda: backend.write_c4_selection(selection),
        "attention": lambda: backend.forward(inputs.q, batch, 4, inputs.sink),
    }
    graphs = [whole, *(captured(part) for part in parts.values())]
    spent = [median_microseconds(times) for times in replays(graphs)]
    named = [
        StepMeasurement(f"step of 256 rows, {name}", t, "us", "") for name, t in zip(parts, spent[1:], strict=True)
    ]
    return [
        *named,
        StepMeasurement("step of 256 rows, whole", spent[0], "us", ""),
        StepMeasurement("step of 256 rows, whole over its parts", 100 * spent[0] / sum(spent[1:]), "%", "at most 110"),
    ]


def device_launches(work: Callable[[], object]) -> int:
    """Kernels, copies and fills that ``work`` puts on the device."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        work()
        torch.cuda.synchronize()
    return sum(event.count for event in record.key_averages() if str(event.device_type).endswith("CUDA"))
