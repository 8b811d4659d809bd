"""Padding: every field by the table, whole request groups, the scheduler's batch left alone."""

from dataclasses import fields

import pytest
import torch

from dsv4_matrix.modes.padding import REQUEST_FIELDS, ROW_FIELDS, PadSpec, pad, whole_groups
from dsv4_matrix.modes.rig import Rig
from dsv4_matrix.protocol import ForwardBatch


@pytest.fixture
def batch_of(toy):
    return Rig(toy.ToyBackend, "cpu", 0).batch


def test_decode_3_to_5(batch_of):
    batch = batch_of("decode", requests=3)
    before = {item.name: getattr(batch, item.name) for item in fields(ForwardBatch)}
    padded = pad(batch, PadSpec(3, 5, 1))
    assert padded.seq_lens.tolist() == padded.seq_lens_cpu == [13, 13, 13, 1, 1]
    assert padded.req_pool_indices.tolist() == [1, 2, 3, 0, 0]
    assert padded.positions.tolist() == [12, 12, 12, 0, 0]
    assert padded.out_cache_loc.tolist() == [*batch.out_cache_loc.tolist(), 0, 0]
    assert all(getattr(batch, name) is value for name, value in before.items())


def test_draft_extend_pads_whole_groups(batch_of):
    padded = pad(batch_of("draft_extend", requests=2, rows=4), PadSpec(2, 3, 4))
    assert padded.extend_seq_lens.tolist() == padded.extend_seq_lens_cpu == [4, 4, 4]
    assert padded.seq_lens.tolist() == [16, 16, 1]
    assert len(padded.positions) == len(padded.out_cache_loc) == 12
    assert not padded.out_cache_loc[8:].any()


def test_lengths_on_the_device_only_stay_there(batch_of):
    batch = batch_of("draft_extend", rows=2)
    batch.seq_lens_cpu = batch.extend_seq_lens_cpu = None
    padded = pad(batch, PadSpec(2, 4, 2))
    assert padded.seq_lens_cpu is None
    assert padded.extend_seq_lens_cpu is None


def test_a_verify_batch_keeps_its_width(batch_of):
    padded = pad(batch_of("target_verify", rows=3), PadSpec(2, 4, 3))
    assert padded.draft_token_num == 3
    assert padded.extend_seq_lens is None
    assert padded.seq_lens.tolist() == [12, 12, 1, 1]


@pytest.mark.parametrize(("requests", "padded"), [(33, 36), (36, 36), (38, 40), (39, 40)])
def test_rows_become_a_multiple_of_alignment_and_width(requests, padded):
    assert whole_groups(requests, 6, 8) == padded
    assert padded * 6 % 8 == 0


def test_padding_twice_or_by_another_width_is_refused(batch_of):
    batch, spec = batch_of("target_verify", rows=3), PadSpec(2, 4, 3)
    with pytest.raises(ValueError, match="4 requests and 12 rows cannot be padded as 2 requests of 3 rows"):
        pad(pad(batch, spec), spec)
    with pytest.raises(ValueError, match="2 requests and 6 rows cannot be padded as 2 requests of 4 rows"):
        pad(batch, PadSpec(2, 4, 4))
    with pytest.raises(ValueError, match="5 requests do not fit a graph of 4"):
        PadSpec(5, 4, 1)


def test_every_tensor_field_has_a_rule():
    # verify_lens is for ragged chains, which no captured graph takes.
    tensors = {item.name for item in fields(ForwardBatch) if "Tensor" in str(item.type)}
    assert tensors == {*REQUEST_FIELDS, *ROW_FIELDS, "verify_lens"}


def test_an_idle_rank_is_pads_only(batch_of):
    batch = batch_of("decode")
    empty = ForwardBatch("decode", *(torch.empty(0, dtype=torch.int64) for _ in range(4)), seq_lens_cpu=[])
    padded = pad(empty, PadSpec(0, 2, 1))
    assert padded.seq_lens.tolist() == padded.seq_lens_cpu == [1, 1]
    assert padded.seq_lens.dtype == batch.seq_lens.dtype
