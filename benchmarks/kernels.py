"""Times of the Triton kernels on one GPU: attention over the decode shapes, pack-and-store against a plain copy.

CUDA-graph replays, L2 flushed before each, medians; every shape twice, so that the spread shows what a difference
means. ``--tile block_n=32,num_stages=2`` measures attention with other tiles than the target's own (repeatable).
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable

import torch
from dsv4_triton import attention, target
from dsv4_triton.flash_mla import flash_mla_with_kvcache
from dsv4_triton.pool import PackedPool
from dsv4_triton.store import pack_and_store, unpack

#: (name, main page, extra page, extra width): SWA of 128 keys, and what a compressed layer adds
LAYERS = (("SWA", 256, 0, 0), ("C4", 256, 64, 512), ("C4", 256, 64, 1024), ("C128", 256, 2, 1024))


def replay_times(work: Callable[[], object], repeats: int) -> float:
    """Median microseconds of ``work`` as a CUDA graph with a cold L2."""
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(repeats + 3):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[3:])


def filled(pages: int, page: int) -> PackedPool:
    pool = PackedPool(pages, page, "cuda")
    rows = torch.randn(pool.capacity, 512, device="cuda").bfloat16() / 10
    pack_and_store(rows, torch.arange(pool.capacity, device="cuda"), pool)
    return pool


def attention_call(
    heads: int, batch: int, s_q: int, page: int, extra_page: int, extra_width: int
) -> Callable[[], object]:
    """Full lists of distinct random keys of each request's own part of the pools, a sink, the library's own layout."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def keys(page: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        per_request = 4096
        pool = filled(batch * per_request // page, page)
        order = [torch.randperm(per_request, device="cuda", generator=generator)[:width] for _ in range(batch * s_q)]
        indices = torch.stack(order).view(batch, s_q, width).int()
        return pool.view(), indices + (torch.arange(batch, device="cuda").int() * per_request)[:, None, None]

    q = torch.randn(batch, s_q, heads, 512, device="cuda").clamp(-1, 1).bfloat16()
    sink = torch.randn(heads, device="cuda")
    cache, indices = keys(page, 128)
    extra = {}
    if extra_width:
        more, chosen = keys(extra_page, extra_width)
        extra = {"extra_k_cache": more, "extra_indices_in_kvcache": chosen}
    return lambda: flash_mla_with_kvcache(
        q, cache, None, None, 512, None, is_fp8_kvcache=True, indices=indices, attn_sink=sink, **extra
    )


def time_attention(batches: list[int], s_q: int, repeats: int) -> None:
    for name, page, extra_page, extra_width in LAYERS:
        for heads in (64, 128):
            for batch in batches:
                call = attention_call(heads, batch, s_q, page, extra_page, extra_width)
                first, second = (replay_times(call, repeats) for _ in range(2))
                flops = 2 * batch * s_q * (128 + extra_width) * heads * 1024
                print(
                    f"{name:5} 128+{extra_width:<5} H={heads:<4} b={batch:<4} s_q={s_q}  {first:8.1f} us "
                    f"(again {second:8.1f})  {flops / first / 1e6:6.0f} TFLOP/s",
                    flush=True,
                )


def time_store(rows: int, repeats: int) -> None:
    """Bytes moved a second, against a copy that moves as many."""
    pool = PackedPool(rows // 256 + 2, 256, "cuda")
    k = torch.randn(rows, 512, device="cuda").bfloat16()
    slots = torch.randperm(rows, device="cuda") + 1
    out = torch.empty_like(k)
    moved = rows * (1024 + 583 + 8)
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    sink = torch.empty_like(source)
    for name, work in (
        ("copy", lambda: sink.copy_(source)),
        ("pack_and_store", lambda: pack_and_store(k, slots, pool)),
        ("unpack", lambda: unpack(pool, slots, out)),
    ):
        us = replay_times(work, repeats)
        print(f"{name:15} {rows} rows  {us:8.1f} us  {moved / us / 1e6:6.2f} TB/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="2,64,128,256", help="requests, comma separated")
    parser.add_argument("--s-q", type=int, default=2, help="query rows a request")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rows", type=int, default=65536, help="rows of the store benchmark")
    parser.add_argument("--tile", action="append", default=[], help="field=value,... of Target to replace")
    parser.add_argument("--split-keys", type=int, default=attention.SPLIT_KEYS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "benchmarks/kernels.py needs a GPU: interpreted times say nothing about one\n")
    own = target.target_of(torch.device("cuda", torch.cuda.current_device()))
    time_store(options.rows, options.repeats)
    attention.SPLIT_KEYS = options.split_keys
    for tile in ["", *options.tile]:
        changes = {k: int(v) for k, v in (pair.split("=") for pair in tile.split(",") if pair)}
        chosen = dataclasses.replace(own, **changes)
        attention.target_of = lambda _, chosen=chosen: chosen
        print(f"-- {chosen}")
        time_attention([int(b) for b in options.batches.split(",")], options.s_q, options.repeats)


if __name__ == "__main__":
    main()
