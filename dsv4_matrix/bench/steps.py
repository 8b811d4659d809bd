"""What surrounds attention in a decode step: metadata, storing keys, and the whole captured step against its parts.

Works through the backend protocol only, so that any backend can be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from dsv4_matrix.bench.floors import BF16_BYTES, HEAD_DIM, TOKEN_BYTES
from dsv4_matrix.bench.launches import graph_launches, kernel_microseconds
from dsv4_matrix.bench.results import StepMeasurement
from dsv4_matrix.bench.timing import captured, median_microseconds, replays
from dsv4_matrix.modes.step import StepInputs, run_captured_step
from dsv4_matrix.protocol import AttentionBackend, BackendFactory, ForwardBatch, ForwardMode, RunnerConfig

PAGE, HEADS, TOPK = 256, 64, 512
REQUESTS, CONTEXT = 256, 4096
STORE_ROWS = (4096, 65536)
#: a row's location, and the slot that it stands for
ADDRESS_BYTES = 16


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


def measure_steps(factory: BackendFactory, device: torch.device) -> Iterator[StepMeasurement]:
    """Metadata of 256 decode rows, stores of 4096 and 65,536 rows, and a whole decode step of ratio 4, as they come."""
    runner = decode_runner(device)
    backend = factory(runner)
    batch = decode_batch(runner)
    yield from _metadata(backend, batch)
    for rows in STORE_ROWS:
        yield from _store(backend, runner, rows)
    yield from _step(backend, runner, batch)


def _metadata(backend: AttentionBackend, batch: ForwardBatch) -> Iterator[StepMeasurement]:
    def work() -> None:
        backend.init_forward_metadata(batch)

    yield StepMeasurement(f"metadata of {REQUESTS} decode rows, launches", graph_launches(work), "", at_most=3)
    spent = median_microseconds(replays([captured(work)])[0])
    yield StepMeasurement(f"metadata of {REQUESTS} decode rows", spent, "us", at_most=20)


def _store(backend: AttentionBackend, runner: RunnerConfig, rows: int) -> Iterator[StepMeasurement]:
    """A store reads bf16 rows and where each goes, and writes packed tokens: held against a copy of as many bytes."""
    keys = torch.randn(rows, HEAD_DIM, device=runner.req_to_token.device).bfloat16()
    # the whole contexts of the first requests, as prompts fill them, in an order that no cache line gains from
    order = torch.randperm(rows, device=keys.device)
    locations = runner.req_to_token[1:].reshape(-1)[order].to(torch.int64)
    moved = rows * (HEAD_DIM * BF16_BYTES + ADDRESS_BYTES + TOKEN_BYTES)
    source = torch.empty(moved // 2, dtype=torch.uint8, device=keys.device)
    target = torch.empty_like(source)
    works: list[Callable[[], object]] = [
        partial(backend.set_key_buffer, locations, keys),
        partial(target.copy_, source),
    ]
    stored, copied = (median_microseconds(times) for times in replays([captured(work) for work in works]))
    yield StepMeasurement(f"pack and store of {rows} rows", stored, "us")
    yield StepMeasurement(f"copy of as many bytes ({moved})", copied, "us")
    yield StepMeasurement(f"pack and store of {rows} rows, speed of that copy", 100 * copied / stored, "%", at_least=70)


def _fill(backend: AttentionBackend, runner: RunnerConfig) -> None:
    """A history of every request: what multiplies zeros draws less power than what multiplies keys."""
    for tokens in runner.req_to_token[1:].reshape(-1).to(torch.int64).split(STORE_ROWS[-1]):
        keys = torch.randn(len(tokens), HEAD_DIM, device=tokens.device).div_(10).bfloat16()
        backend.set_key_buffer(tokens, keys)
        ends = tokens[(tokens + 1) % 4 == 0]
        backend.set_extra_key_buffer(4, ends, keys[: len(ends)])


def _step(backend: AttentionBackend, runner: RunnerConfig, batch: ForwardBatch) -> Iterator[StepMeasurement]:
    """A captured step of ratio 4: its parts each captured alone, the whole, and the whole against its kernels."""
    _fill(backend, runner)
    device, rows = runner.req_to_token.device, batch.batch_size
    compressed = torch.randn(rows, HEAD_DIM, device=device).bfloat16()
    selection = torch.rand(rows, CONTEXT // 4, device=device).argsort(1)[:, :TOPK].to(torch.int32)
    inputs = StepInputs(
        batch=batch,
        ratio=4,
        q=torch.randn(rows, HEADS, HEAD_DIM, device=device).bfloat16(),
        k=torch.randn(rows, HEAD_DIM, device=device).bfloat16(),
        compressed=compressed,
        selection=selection,
        sink=torch.zeros(HEADS, device=device),
    )
    backend.init_cuda_graph_state(rows, rows)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    whole = captured(lambda: run_captured_step(backend, inputs))
    # a capture leaves the inputs of pad requests behind, which see a single key
    backend.init_forward_metadata_out_graph(batch)
    parts: dict[str, Callable[[], object]] = {
        "metadata": lambda: backend.init_forward_metadata_in_graph(batch),
        "store": lambda: backend.store_kv(batch, inputs.k),
        "compressed store": lambda: backend.store_compressed(batch, 4, compressed),
        "selection": lambda: backend.write_c4_selection(selection),
        "attention": lambda: backend.forward(inputs.q, batch, 4, inputs.sink),
    }
    graphs = [whole, *(captured(part) for part in parts.values())]
    step = f"step of {REQUESTS} rows"
    times = [median_microseconds(samples) for samples in replays(graphs)]
    for name, time in zip(parts, times[1:], strict=True):
        yield StepMeasurement(f"{step}, {name} alone", time, "us")
    yield StepMeasurement(f"{step}, whole", times[0], "us")
    # without a flush on either side: one cannot be put between the kernels that are profiled
    again = median_microseconds(replays([whole], flush=False)[0])
    kernels = kernel_microseconds(whole)
    yield StepMeasurement(f"{step}, whole, L2 not emptied", again, "us")
    yield StepMeasurement(f"{step}, sum of its kernels as profiled", kernels, "us")
    yield StepMeasurement(f"{step}, whole over its kernels", 100 * again / kernels, "%", at_most=110)
