"""Keys and queries: the same in every process, equal across steps where nothing was rolled back, and telling."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from dsv4_matrix.cases.build import build_scenario
from dsv4_matrix.cases.queries import select, sinks

_DIGEST = """
import hashlib, torch
from dsv4_matrix.cases.build import build_scenario
from dsv4_matrix.declaration import Case, Cell, State, Variant, find_matrix, load_matrix
variant = Variant(name="made", forward="target-verify", prefix_lens=(254, 30), extend_lens=(5, 5), accept_lens=(1, 4),
                  reuse="freed", sink="per-head", heads=16)
cell = Cell(4, "verify-eager", State.COVERED, (variant,))
scenario = build_scenario(Case("r4-verify-eager-made", "case", cell, variant), load_matrix(find_matrix()), "cpu")
digest = hashlib.sha256()
for step, place in zip(scenario.steps, scenario.placements):
    for tensor in (step.q, step.k, step.compressed, step.tokens, step.entries, step.selection, step.sink,
                   place.batch.out_cache_loc, place.history_loc, place.history_k, place.entry_loc, place.entry_k,
                   place.req_to_token, place.mapping):
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
print(digest.hexdigest())
"""


def test_two_processes_draw_the_same_bytes():
    digests = {
        subprocess.run(
            [sys.executable, "-c", _DIGEST],
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, threads in (("0", "1"), ("1", "2"))
    }
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64


def test_another_case_id_draws_other_bytes(make, make_case, matrix):
    case = make_case(0, "eager", "decode", (64,))
    other = build_scenario(replace(case, id="r0-eager-other"), matrix, "cpu")
    assert not torch.equal(build_scenario(case, matrix, "cpu").steps[0].q, other.steps[0].q)


def test_rejected_drafts_are_unseen_but_for_the_decoy(make):
    scenario = make(4, "verify-eager", "target-verify", (6, 40), extend_lens=(6, 6), accept_lens=(2, 5))
    verify, follow = scenario.steps
    start, later = verify.token_base.tolist(), follow.token_base.tolist()
    for request, (prefix, kept) in enumerate(((6, 2), (40, 5))):
        committed = prefix + kept
        before = verify.tokens[start[request] :][: prefix + 6]
        after = follow.tokens[later[request] : later[request + 1]]
        assert torch.equal(before[:committed], after[:committed])
        # The next token is another than the draft that stood at its place; the draft behind it is the decoy.
        assert not torch.equal(before[committed], after[committed])
        if kept == 2:
            assert torch.equal(before[committed + 1], after[committed + 1])
    # Entry 2 of request 0 was completed by rejected drafts: it is a decoy now.
    assert torch.equal(verify.entries[2], follow.entries[2])
    assert follow.entry_base.tolist() == [0, 9 // 4 + 1, 9 // 4 + 1 + 46 // 4 + 1]


def test_each_row_emits_its_entry(make):
    step = make(4, "eager", "extend", (2,), extend_lens=(7,)).steps[0]
    emitted = ~step.compressed.isnan().any(1)
    assert step.positions[emitted].tolist() == [3, 7]
    assert torch.equal(step.compressed[emitted], step.entries[:2])


def test_keys_stay_inside_the_contract_when_quantised(make):
    step = make(128, "eager", "decode", (300,)).steps[0]
    assert step.tokens.abs().max() < 1
    assert step.entries.abs().max() < 1


def test_sinks_take_a_share_where_heads_are_aimed_at_them(make):
    step = make(0, "eager", "decode", (63, 200), sink="per-head").steps[0]
    for row, (base, position) in enumerate(zip(step.token_base.tolist(), step.positions.tolist(), strict=False)):
        keys = step.tokens[base + max(0, position - 127) : base + position + 1].double()
        lse = torch.logsumexp(step.q[row].double() @ keys.T * step.softmax_scale, 1)
        share = torch.sigmoid(step.sink.double() - lse)
        assert ((share > 0.1) & (share < 0.9)).sum() >= 8


def test_sink_kinds():
    assert sinks("off", 4, 1).tolist() == pytest.approx([-1e30] * 4)
    assert set(sinks("zero", 4, 1).tolist()) == {0.0}
    assert len(set(sinks("per-head", 64, 1).tolist())) == 64
    with pytest.raises(ValueError, match="per-head"):
        sinks("some", 4, 1)


@pytest.mark.parametrize("hostile", [True, False])
def test_selection_takes_all_entries_or_exactly_topk_distinct_ones(hostile):
    positions = np.array([0, 2, 3, 2047, 2051, 9000])
    selection = select(positions, 512, hostile, 7, 0)
    for row, position in zip(selection, positions, strict=True):
        complete = (position + 1) // 4
        chosen = row[row >= 0]
        assert len(chosen) == len(set(chosen)) == min(complete, 512)
        assert (row[len(chosen) :] == -1).all()
        assert (chosen < complete).all()
        if complete:
            assert {0, complete - 1} <= set(chosen.tolist())
        if complete > 2:
            assert (np.diff(chosen) > 0).all() != hostile


def test_a_strided_query_lies_between_poison(make):
    plain = make(0, "eager", "decode", (64,)).steps[0].q
    strided = make(0, "eager", "decode", (64,), q_layout="strided").steps[0].q
    assert torch.equal(plain, strided)
    assert not strided.is_contiguous()
    assert strided.as_strided((64,), (1,), strided.storage_offset() + 512).isnan().all()


def test_requests_differ_in_magnitude_and_score_alike(make):
    """Powers of two, down to both sides of the floor of 1e-4 under which a group's scale no longer follows it."""
    (step,) = make(4, "eager", "decode", (140, 140, 140), heads=16).steps
    start = step.token_base.tolist()
    tops = [step.tokens[begin:end].float().abs().max().item() for begin, end in itertools.pairwise(start)]
    assert [top / tops[0] for top in tops] == pytest.approx([1, 2**-6, 2**-13], rel=0.02)
    groups = step.tokens[start[2] : start[3], :448].float().reshape(-1, 64).abs().amax(1)
    assert groups.min() < 1e-4 < groups.max()
    scores = [
        (step.q[row].float() @ step.tokens[begin:end].float().T * step.softmax_scale).abs().max().item()
        for row, (begin, end) in enumerate(itertools.pairwise(start))
    ]
    assert scores == pytest.approx([scores[0]] * 3, rel=0.2)


def test_some_heads_score_beyond_what_exp_holds(make):
    (step,) = make(0, "eager", "decode", (300,), heads=16).steps
    window = step.tokens[300 - 127 : 301].float()
    best = (step.q[0].float() @ window.T * step.softmax_scale).amax(1)
    assert (best > 88.7).nonzero().flatten().tolist() == [6, 14]
    assert best.max() < 200
