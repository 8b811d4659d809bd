"""The benchmark without a GPU: what it counts, what it prints, and how it refuses. No time is asserted anywhere."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from dsv4_reference.codec import dequantise, quantise

from dsv4_matrix.bench import present
from dsv4_matrix.bench.command import run_bench
from dsv4_matrix.bench.floors import Ceilings, moved_bytes, operations
from dsv4_matrix.bench.inputs import build_inputs, packed_cache
from dsv4_matrix.bench.measure import Measurement, summarise
from dsv4_matrix.bench.shapes import NoSuchShapeError, Shape, long_shapes, peer_table, select
from dsv4_matrix.bench.steps import StepMeasurement
from dsv4_matrix.loading import LoadError, load_kernel

C4 = Shape(4, 64, 64, 2, 128, 256, 512, 64)
H200 = Ceilings(4.3e12, 790e12)
CPU = torch.device("cpu")


def result(shape: Shape, median: float, table: float | None, beside: float | None = None) -> Measurement:
    return Measurement(shape, median, median - 1, median + 1, 15.0, 13.6, table, beside)


def test_the_peer_table_is_whole():
    table = peer_table()
    assert len(table.microseconds) == 41
    assert table.gpu == "NVIDIA H200"
    assert table.microseconds[C4] == 56.1
    assert len({shape.name for shape in table.microseconds}) == 41
    assert {(s.ratio, s.heads) for s in table.microseconds} == {(0, 64), (4, 64), (4, 128), (128, 64), (128, 128)}


def test_shapes_are_chosen_by_name():
    shapes = list(peer_table().microseconds)
    chosen = [shape.name for shape in select(shapes, "c4-h64-*-b64-q2, swa-*-b4-*")]
    assert chosen == ["c4-h64-k640-b64-q2", "swa-h64-k128-b4-q1"]
    assert select(shapes, None) == shapes
    with pytest.raises(NoSuchShapeError, match="no shape matches 'c5-\\*'; there are c4-h64"):
        select(shapes, "c4-*,c5-*")


def test_long_contexts_reach_the_width_of_a_million_tokens():
    assert max(shape.extra_topk for shape in long_shapes()) == 2**20 // 128
    assert any(shape.shared and shape.rows == 8192 for shape in long_shapes())


def test_floors_are_those_of_the_written_table():
    """15.0 and 13.6 us for C4, 64 heads, batch 64; 111.3 and 195.7 for 128 heads, batch 256 (performance.md)."""
    wide = Shape(4, 128, 256, 2, 128, 256, 1024, 64)
    for shape, memory, matrix in ((C4, 15.0, 13.6), (wide, 111.3, 195.7)):
        assert H200.memory_microseconds(moved_bytes(shape)) == pytest.approx(memory, abs=0.06)
        assert H200.matrix_microseconds(operations(shape)) == pytest.approx(matrix, abs=0.06)


def test_packed_keys_are_what_the_format_says():
    """Held against the reference's codec, through the strides that a kernel sees."""
    cache = packed_cache(8, 4, torch.Generator().manual_seed(1))
    keys = torch.randn(8, 512, generator=torch.Generator().manual_seed(1)) / 10
    assert cache.shape == (2, 4, 1, 584)
    assert cache.stride(0) % 576 == 0
    codes, scales = quantise(keys.bfloat16())
    for slot in range(8):
        page = torch.as_strided(cache, (cache.stride(0),), (1,), (slot // 4) * cache.stride(0))
        entry = slot % 4
        got_codes, got_scales = page[entry * 576 :][:448], page[4 * 576 + entry * 8 :][:7]
        got = dequantise(got_codes[None], got_scales[None])[0]
        want = dequantise(codes[slot : slot + 1], scales[slot : slot + 1])[0]
        assert torch.equal(got, want)
        rope = page[entry * 576 + 448 :][:128].clone().view(torch.bfloat16)
        assert torch.equal(rope, keys[slot, 448:].bfloat16())


def test_a_small_cache_is_repeated_into_a_large_one(monkeypatch):
    monkeypatch.setattr("dsv4_matrix.bench.inputs.DISTINCT_KEYS", 8)
    cache = packed_cache(20, 2, torch.Generator().manual_seed(1))
    assert cache.shape[0] == 10
    assert torch.equal(cache[4:8], cache[:4])
    assert torch.equal(cache[8:], cache[:2])
    assert not torch.equal(cache[1], cache[0])


@pytest.mark.parametrize("shared", [False, True])
def test_selections_are_distinct_slots_of_the_rows_request(shared, monkeypatch):
    monkeypatch.setattr("dsv4_matrix.bench.inputs.SLOTS_MULTI_ROW", (128, 64))
    shape = dataclasses.replace(C4, batch=3, topk=16, page=32, extra_topk=8, extra_page=2, shared=shared)
    inputs = build_inputs(shape, CPU)
    assert inputs.extra is not None
    assert inputs.q.shape == (3, 2, 64, 512)
    assert inputs.q.abs().max() <= 1
    for keys, slots in ((inputs.main, 128), (inputs.extra, 64)):
        pages, page = keys.cache.shape[:2]
        assert pages * page == slots * (1 if shared else 3)
        for request in range(3):
            for row in keys.indices[request]:
                assert len(set(row.tolist())) == len(row)
                assert set((row // slots).tolist()) == {0 if shared else request}
    again = build_inputs(shape, CPU)
    assert torch.equal(again.q, inputs.q)
    assert torch.equal(again.main.indices, inputs.main.indices)


def test_a_row_of_the_table_and_its_summary():
    fast, slow = result(C4, 50.0, 56.1), result(dataclasses.replace(C4, batch=1), 20.0, 10.0)
    columns = "c4-h64-k640-b64-q2 50.0 49.0-51.0 15.0 13.6 3.3 56.1 1.12"
    assert present.line(fast).split() == columns.split()
    assert len(present.line(fast)) == len(present.HEADER)
    assert "geometric mean 0.749, worst 0.500 (c4-h64-k640-b1-q2)" in present.closing([fast, slow], H200)
    assert "no peer times" in present.closing([result(C4, 50.0, None)], H200)
    assert summarise([]) is None


def test_side_by_side_goes_before_the_table():
    assert result(C4, 50.0, 56.1, beside=40.0).ratio == pytest.approx(0.8)


def test_json_has_everything_measured():
    steps = [StepMeasurement("metadata", 12.5, "us", "at most 20")]
    text = present.as_json({"gpu": "x"}, H200, {"peer table": [result(C4, 50.0, 56.1)]}, steps)
    found = json.loads(text)
    assert found["shapes"]["peer table"][0]["name"] == "c4-h64-k640-b64-q2"
    assert found["shapes"]["peer table"][0]["shape"]["heads"] == 64
    assert found["summary"] == {"geometric_mean": pytest.approx(1.122), "worst": "c4-h64-k640-b64-q2"}
    assert found["steps"][0]["value"] == 12.5
    assert present.step_lines(steps)[0].split() == ["metadata", "12.5", "us", "at", "most", "20"]


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    arguments = {"kernel": None, "backend": None, "shapes": None, "long": False, "steps": False, "json_path": None}
    assert run_bench(**arguments, plot_path="x.svg") == 2
    assert "needs matplotlib" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    done = subprocess.run(
        [sys.executable, "-m", "dsv4_matrix.cli", "bench", "--kernel", "dsv4_matrix.loading:load_kernel"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == "dsv4-matrix bench: there is no GPU here: torch.cuda.is_available() is False\n"


def test_kernels_are_found_as_backends_are():
    name, function = load_kernel("dsv4_matrix.loading:load_kernel")
    assert (name, function) == ("dsv4_matrix.loading:load_kernel", load_kernel)
    with pytest.raises(LoadError, match="cannot be called"):
        load_kernel("dsv4_matrix.loading:KERNELS")
