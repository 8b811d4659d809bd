"""Copy rules of attention.md §3.4: values move, captured storage stays, and no field is forgotten."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch
from dsv4_triton.copy_rules import CopyRules, assign_scheduler
from dsv4_triton.forward_metadata import (
    DSV4Metadata,
    DSV4RawDecodeMetadata,
    DSV4RawVerifyMetadata,
    PagedIndexerMetadata,
)
from dsv4_triton.metadata import DSV4AttnMetadata, Scheduler

EQUAL = ("page_size", "index_topk", "cuda_int32_kwargs")
ASSIGNED = ("swa_out_cache_loc", "c0_flashmla_metadata", "c4_flashmla_metadata", "c128_flashmla_metadata")
TENSORS = [field.name for field in fields(DSV4AttnMetadata) if field.name not in (*EQUAL, *ASSIGNED)]


def filled(base: int, **changes) -> DSV4AttnMetadata:
    """Metadata whose every tensor field holds its own number."""
    values = {name: torch.full((2,), base + number, dtype=torch.int32) for number, name in enumerate(TENSORS)}
    values |= {name: Scheduler() for name in ASSIGNED if name.endswith("metadata")}
    values |= {"swa_out_cache_loc": torch.full((2,), base + 99, dtype=torch.int32)}
    values |= {"page_size": 256, "index_topk": 512, "cuda_int32_kwargs": {"dtype": torch.int32}}
    return DSV4AttnMetadata(**(values | changes))


def wrapped(base: int, **changes) -> DSV4Metadata:
    core = filled(base)
    return DSV4Metadata(core, PagedIndexerMetadata(256, core.page_table.clone(), core.c4_out_loc.clone()), **changes)


def test_values_move_and_storage_stays():
    captured, fresh = filled(0), filled(1000)
    before = {name: getattr(captured, name) for name in TENSORS}
    captured.copy_(fresh)
    for number, name in enumerate(TENSORS):
        assert getattr(captured, name) is before[name], name
        assert getattr(captured, name).tolist() == [1000 + number] * 2, name
    assert captured.swa_out_cache_loc is fresh.swa_out_cache_loc
    assert captured.c4_flashmla_metadata is fresh.c4_flashmla_metadata


@pytest.mark.parametrize(("name", "other"), [("page_size", 128), ("index_topk", 1024), ("cuda_int32_kwargs", {})])
def test_fields_that_must_agree(name, other):
    captured = filled(0)
    with pytest.raises(AssertionError, match=name):
        captured.copy_(filled(1000, **{name: other}))
    assert captured.page_table.tolist() == filled(0).page_table.tolist(), "nothing may be written before the refusal"


def test_a_field_that_both_sides_lack_is_skipped():
    captured, fresh = filled(0, c4_sparse_raw_indices=None), filled(1000, c4_sparse_raw_indices=None)
    captured.copy_(fresh)
    assert captured.c4_sparse_raw_indices is None


def test_a_field_cannot_appear():
    captured = filled(0, c4_sparse_raw_indices=None)
    with pytest.raises(AssertionError, match="c4_sparse_raw_indices is None here"):
        captured.copy_(filled(1000))
    assert captured.page_table[0] == filled(0).page_table[0]


def test_a_field_cannot_disappear():
    with pytest.raises(TypeError, match="c128_page_indices"):
        filled(0).copy_(filled(1000, c128_page_indices=None))


def test_shapes_are_not_broadcast():
    with pytest.raises(AssertionError, match=r"page_table has shape \[2\] here and \[1\]"):
        filled(0).copy_(filled(1000, page_table=torch.zeros(1, dtype=torch.int32)))


def test_types_must_match():
    with pytest.raises(AssertionError, match="expected a DSV4AttnMetadata"):
        filled(0).copy_(wrapped(0))


def initialised(value: int, size: int = 3) -> Scheduler:
    scheduler = Scheduler()
    scheduler.tile_scheduler_metadata = torch.full((size,), value)
    scheduler.num_splits = torch.full((size,), value)
    return scheduler


def test_a_scheduler_whose_buffers_a_graph_holds_is_kept_or_refilled():
    kept = initialised(1)
    assert assign_scheduler(kept, Scheduler()) is kept
    buffer = kept.tile_scheduler_metadata
    assert assign_scheduler(kept, initialised(2)) is kept
    assert kept.tile_scheduler_metadata is buffer
    assert buffer.tolist() == kept.num_splits.tolist() == [2, 2, 2]
    bigger = initialised(3, size=4)
    assert assign_scheduler(kept, bigger) is bigger
    empty, fresh = Scheduler(), initialised(4)
    assert assign_scheduler(empty, fresh) is fresh
    assert assign_scheduler(kept, None) is None


@pytest.mark.parametrize("rules", [DSV4AttnMetadata.COPY_RULES, DSV4AttnMetadata.BREAKABLE_RULES])
def test_rules_name_every_field_once(rules):
    rules.check_partition(DSV4AttnMetadata)


def test_a_forgotten_twice_named_or_invented_field_is_noticed():
    @dataclass
    class Two:
        a: int
        b: int

    CopyRules(copy=("a",), keep=("b",)).check_partition(Two)
    with pytest.raises(AssertionError, match=r"missing \['b'\]"):
        CopyRules(copy=("a",)).check_partition(Two)
    with pytest.raises(AssertionError, match=r"twice \['b'\]"):
        CopyRules(copy=("a", "b"), assign=("b",)).check_partition(Two)
    with pytest.raises(AssertionError, match=r"unknown \['c'\]"):
        CopyRules(copy=("a", "b", "c")).check_partition(Two)


def test_the_wrapper_copies_its_parts_and_drops_what_belongs_to_one_forward():
    captured = wrapped(0, sparse_prefill_cache=object(), prefill_shared_reads_snapshotted=True)
    indexer, table = captured.indexer_metadata, captured.indexer_metadata.page_table
    fresh = wrapped(1000)
    captured.copy_(fresh)
    assert captured.core_metadata is captured.core_attn_metadata
    assert captured.core_metadata.page_table.tolist() == fresh.core_metadata.page_table.tolist()
    assert captured.indexer_metadata is indexer
    assert captured.indexer_metadata.page_table is table
    assert table.tolist() == fresh.indexer_metadata.page_table.tolist()
    assert captured.sparse_prefill_cache is None
    assert captured.prefill_shared_reads_snapshotted is False


def test_parts_of_different_type_are_refused_before_anything_is_copied():
    captured, fresh = wrapped(0), wrapped(1000)
    fresh.indexer_metadata = None
    with pytest.raises(AssertionError, match="indexer_metadata"):
        captured.copy_(fresh)
    assert captured.core_metadata.page_table.tolist() == wrapped(0).core_metadata.page_table.tolist()


def test_the_indexer_page_size_is_256():
    with pytest.raises(AssertionError, match="page_size is 64"):
        PagedIndexerMetadata(64, torch.zeros(1), torch.zeros(1))


class Plan:
    def __init__(self, value: int) -> None:
        self.value = value

    def copy_(self, other: Plan) -> None:
        self.value = other.value


def test_raw_inputs_keep_their_storage():
    def raw(base: int, cls=DSV4RawDecodeMetadata, **more):
        return cls(*(torch.full((3,), base + number) for number in range(3)), **more)

    captured = raw(0)
    lens = captured.seq_lens
    captured.copy_(raw(10))
    assert captured.seq_lens is lens
    assert lens.tolist() == [11, 11, 11]

    plan = Plan(1)
    verify = raw(0, DSV4RawVerifyMetadata, verify_lens=torch.tensor([2]), c128_compress_metadata=plan)
    read_in_graph = verify.verify_lens
    fresh = raw(
        10, DSV4RawVerifyMetadata, verify_lens=torch.tensor([5]), seq_lens_cpu=[4], c128_compress_metadata=Plan(2)
    )
    verify.copy_(fresh)
    assert verify.verify_lens is read_in_graph
    assert read_in_graph.tolist() == [5]
    assert verify.seq_lens_cpu is fresh.seq_lens_cpu
    assert verify.c128_compress_metadata is plan
    assert plan.value == 2
    verify.copy_(raw(0, DSV4RawVerifyMetadata, verify_lens=torch.tensor([1])))
    assert verify.c128_compress_metadata is None
    with pytest.raises(AssertionError, match="expected a DSV4RawVerifyMetadata"):
        verify.copy_(raw(0))


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_a_scheduler_a_ratio(ratio):
    core = filled(0)
    assert core.get_flashmla_metadata(ratio) is getattr(core, f"c{ratio}_flashmla_metadata")


@pytest.mark.parametrize("ratio", [1, 2, -4, 64])
def test_no_scheduler_for_an_unknown_ratio(ratio):
    with pytest.raises(ValueError, match=rf"invalid compress_ratio={ratio}"):
        filled(0).get_flashmla_metadata(ratio)
