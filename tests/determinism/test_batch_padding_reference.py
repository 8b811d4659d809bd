"""Padding: round trips, exactly the fields that come back, whole verify requests, and what each shortcut breaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dsv4_reference.batch_padding import (
    FIELDS,
    RESTORED,
    Batch,
    Originals,
    PaddingError,
    PadSpec,
    Phase,
    Unit,
    child,
    pad,
    rank_tokens,
    real_slots,
    unpad,
    unpad_rows,
    verify_padding,
)
from dsv4_reference.coins import verify_coins

from dsv4_matrix.modes.padding import PadSpec as GraphPadSpec
from dsv4_matrix.modes.padding import pad as pad_for_graph
from dsv4_matrix.modes.padding import whole_groups
from dsv4_matrix.protocol import ForwardBatch


def batch(phase, bs, tokens, width=0):
    fields = {
        name: tuple(100 + at for at in range(tokens if unit is Unit.TOKEN else bs)) for name, unit in FIELDS.items()
    }
    return Batch(phase, bs, fields, width)


CASES = [
    (batch(Phase.DECODE, 3, 3, 1), PadSpec(3, 5, 3, 5, fill=1, width=1)),
    (batch(Phase.EXTEND, 2, 7), PadSpec(2, 2, 7, 10)),
    (batch(Phase.DRAFT_DECODE, 3, 3, 1), PadSpec(3, 8, 3, 8, fill=1, width=1)),
    (batch(Phase.TARGET_VERIFY, 2, 8, 4), verify_padding(2, 4, 16)),
]


@pytest.mark.parametrize(("real", "spec"), CASES, ids=[case[0].phase.value for case in CASES])
def test_exactly_the_restored_fields_come_back(real, spec):
    padded = pad(real, spec)
    assert padded.batch_size == spec.padded_bs
    back = unpad(padded)
    assert back.batch_size == real.batch_size
    assert back.originals is None
    for name in FIELDS:
        grew = padded.fields[name] != real.fields[name]
        assert back.fields[name] == (real.fields[name] if name in RESTORED[real.phase] else padded.fields[name])
        unit_pads = (
            spec.padded_tokens > spec.real_tokens if FIELDS[name] is Unit.TOKEN else spec.padded_bs > spec.real_bs
        )
        assert grew is unit_pads


def test_pad_rows_follow_the_real_ones():
    real, spec = CASES[0]
    padded = pad(real, spec)
    assert all(padded.fields[name][:3] == real.fields[name] for name in FIELDS)
    assert padded.fields["seq_lens"][3:] == (1, 1)
    assert padded.fields["out_cache_loc"][3:] == (0, 0)
    assert pad(real, replace(spec, fill=7)).fields["seq_lens_cpu"][3:] == (7, 7)


def test_padding_in_front_would_be_noticed():
    real, spec = CASES[0]
    padded = pad(real, spec)
    front = replace(padded, fields={name: values[3:] + values[:3] for name, values in padded.fields.items()})
    assert unpad(front).fields["seq_lens"] != real.fields["seq_lens"]


@pytest.mark.parametrize(("requests", "padded", "tokens"), [(33, 36, 216), (36, 36, 216), (38, 40, 240), (39, 40, 240)])
def test_verify_pads_whole_requests(requests, padded, tokens):
    spec = verify_padding(requests, 6, 8)
    assert (spec.padded_bs, spec.padded_tokens) == (padded, tokens)


def test_tokens_that_are_no_whole_requests():
    with pytest.raises(PaddingError, match="232 padded tokens are not 38 requests of 6"):
        PadSpec(38, 38, 228, 232, width=6)
    with pytest.raises(PaddingError, match="below the real"):
        PadSpec(3, 2, 3, 3)


def test_ranks():
    assert rank_tokens([5, 17, 0], 8, all_equal=False) == (8, 24, 0)
    assert rank_tokens([5, 17, 0], 8, all_equal=True) == (24, 24, 24)
    assert rank_tokens([], 8, all_equal=True) == ()


@pytest.mark.parametrize(
    ("real", "spec", "rows"),
    [(*CASES[0], 3), (*CASES[1], 7), (*CASES[2], 3), (*CASES[3], 8)],
    ids=[case[0].phase.value for case in CASES],
)
def test_output_rows(real, spec, rows):
    padded = pad(real, spec)
    outputs = list(range(spec.padded_tokens))
    assert unpad_rows(padded, outputs) == outputs[:rows]
    assert unpad_rows(real, outputs) == outputs


def test_an_idle_rank_has_no_rows():
    idle = batch(Phase.DECODE, 0, 0, 1)
    padded = pad(idle, PadSpec(0, 4, 0, 4, width=1))
    assert unpad_rows(padded, list(range(4))) == []
    assert unpad(padded).fields["seq_lens"] == ()


def test_padding_twice_would_lose_the_size():
    real, spec = CASES[0]
    with pytest.raises(PaddingError, match="padded already"):
        pad(pad(real, spec), PadSpec(5, 8, 5, 8, width=1))
    assert pad(unpad_fully(pad(real, spec)), spec).originals == Originals(3, 3)


def unpad_fully(padded):
    """What a scheduler does before it reuses a batch: the fields that stay padded are its own again."""
    back, count = unpad(padded), padded.originals
    sizes = {Unit.TOKEN: count.num_tokens, Unit.REQUEST: count.batch_size}
    return replace(back, fields={name: values[: sizes[FIELDS[name]]] for name, values in back.fields.items()})


def test_the_wrong_size_is_refused():
    real = CASES[0][0]
    with pytest.raises(PaddingError, match="3 elements, the padding is of 2"):
        pad(real, PadSpec(2, 5, 2, 5, width=1))
    with pytest.raises(PaddingError, match="mrope"):
        replace(real, fields={**real.fields, "mrope": (1,)})


def test_children_have_no_originals_and_cut_nothing():
    parent = pad(batch(Phase.TARGET_VERIFY, 3, 12, 4), verify_padding(3, 4, 16))
    left, right = child(parent, 0, 2), child(parent, 2, 4)
    assert left.originals is right.originals is None
    assert unpad(left) is left
    assert (right.batch_size, len(right.fields["positions"])) == (2, 8)
    for name in FIELDS:
        assert left.fields[name] + right.fields[name] == parent.fields[name]
    again = pad(left, verify_padding(2, 4, 16))
    assert again.originals == Originals(2, 8)
    with pytest.raises(PaddingError, match="uneven"):
        child(batch(Phase.EXTEND, 2, 7), 0, 1)


def test_a_child_with_its_parents_originals_would_cut_itself_wrongly():
    parent = pad(batch(Phase.DECODE, 5, 5, 1), PadSpec(5, 8, 5, 8, width=1))
    second = child(parent, 4, 8)
    inheriting = replace(second, originals=parent.originals)
    assert unpad(inheriting).batch_size == 5  # of a child of 4
    assert unpad(second).batch_size == 4
    assert len(unpad_rows(inheriting, list(range(8)))) == 5


def test_coins_need_the_batch_unpadded():
    """Seeds are of the real requests; lengths that are still padded must not be broadcast."""
    real, spec = CASES[0]
    padded, seeds = pad(real, spec), [1, 2, 3]
    with pytest.raises(ValueError, match="unpad"):
        verify_coins(seeds, padded.fields["seq_lens"], 4)
    verify_coins(seeds, unpad(padded).fields["seq_lens"], 4)


def test_a_writer_that_ignores_the_padding_touches_slot_zero():
    real, spec = CASES[0]
    padded = pad(real, spec)

    def written(slots):
        memory = dict.fromkeys(range(200), "free") | {0: "a live request"}
        memory.update(dict.fromkeys(slots, "new"))
        return memory[0]

    assert written(real_slots(padded)) == "a live request"
    assert written(unpad(padded).fields["out_cache_loc"]) == "new"
    assert real_slots(real) == real.fields["out_cache_loc"]


@pytest.mark.parametrize("requests", [1, 3, 33, 36, 38, 39])
@pytest.mark.parametrize(("width", "alignment"), [(1, 8), (4, 8), (6, 8), (5, 1)])
def test_the_harness_pads_by_the_same_rule(requests, width, alignment):
    spec = verify_padding(requests, width, alignment)
    assert whole_groups(requests, width, alignment) == spec.padded_bs
    real = batch(Phase.TARGET_VERIFY, requests, requests * width, width)
    names = ("req_pool_indices", "seq_lens", "out_cache_loc", "positions")
    tensors = {name: torch.tensor(real.fields[name]) for name in names}
    padded = pad_for_graph(ForwardBatch("target_verify", **tensors), GraphPadSpec(requests, spec.padded_bs, width))
    for name in names:
        assert tuple(getattr(padded, name).tolist()) == pad(real, spec).fields[name]
