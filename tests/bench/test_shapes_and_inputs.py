"""What is measured: shapes, their floors, and inputs made as the peer's table says. No time is asserted anywhere."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from dsv4_reference.codec import dequantise, quantise

from dsv4_matrix.bench.floors import moved_bytes, operations
from dsv4_matrix.bench.inputs import build_inputs, packed_cache
from dsv4_matrix.bench.results import Ceilings
from dsv4_matrix.bench.shapes import NoSuchShapeError, Shape, long_shapes, peer_table, select

C4 = Shape(4, 64, 64, 2, 128, 256, 512, 64)
H200 = Ceilings(4.3e12, 790e12)
CPU = torch.device("cpu")


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
    """C128 lists of up to 8192 entries, and 1024 of the 262,144 entries of C4; prompts share one request's cache."""
    decode = [shape for shape in long_shapes() if not shape.shared]
    assert max(shape.extra_topk for shape in decode if shape.ratio == 128) == 2**20 // 128
    assert {shape.extra_slots for shape in decode if shape.ratio == 4} == {2**20 // 4}
    assert max(shape.extra_topk for shape in decode if shape.ratio == 4) == 1024
    prompts = [shape for shape in long_shapes() if shape.shared]
    assert {(shape.ratio, shape.rows) for shape in prompts} == {(4, 8192), (128, 8192)}
    assert len({shape.name for shape in long_shapes()}) == len(long_shapes())


def test_a_shape_may_have_a_cache_of_its_own_size(monkeypatch):
    monkeypatch.setattr("dsv4_matrix.bench.inputs.SLOTS_MULTI_ROW", (64, 64))
    shape = dataclasses.replace(C4, batch=2, topk=16, page=32, extra_topk=8, extra_page=4, extra_slots=1024)
    extra = build_inputs(shape, CPU).extra
    assert extra is not None
    assert extra.cache.shape[:2] == (2 * 1024 // 4, 4)
    assert extra.indices[1].min() >= 1024
    assert extra.indices.max() >= 1024 + 64, "entries were chosen from the standard cache only"


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
