"""The needle says the same in every kind of batch, and all around it differs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4_matrix.cases.batch import DRAFT_RUNNER
from dsv4_matrix.cases.compose import compose
from dsv4_matrix.cases.turns import ALONE, has_needle, kinds_around
from dsv4_matrix.declaration import find_matrix, load_matrix
from dsv4_matrix.judge.bits import bit_equal

MATRIX = load_matrix(find_matrix())
CASES = {case.id: case for case in MATRIX.cases("cpu")}
SOME = (
    "r0-eager-extend-ragged",
    "r4-eager-extend-ragged",
    "r128-eager-extend",
    "r4-cg-decode-emissions",
    "r4-verify-eager-ragged",
    "r128-verify-cg-chain-8-second-entry",
    "r128-eager-decode-heads-128",
    "r0-de-eager-ragged-accept-1-4",
    "r0-eagle-draft-runner-chain-3-steps",
)


@pytest.fixture(scope="module", params=SOME)
def composed(request):
    return CASES[request.param], made(request.param, 3)


def made(case_id, fillers):
    case = CASES[case_id]
    return compose(case, MATRIX, "cpu", (ALONE, *kinds_around(case.variant)), fillers)


def slices(composition):
    for number, places in enumerate(composition.rows):
        for rows in places:
            yield number, rows, composition.alone.steps[composition.own_step[number]]


def cut(composition, number, values):
    return None if values is None else values[composition.part[number]]


def test_the_needles_rows_are_those_of_the_needle_alone(composed):
    _, composition = composed
    seen = 0
    for number, rows, own in slices(composition):
        step = composition.scenario.steps[number]
        seen += 1
        for name in ("q", "k", "compressed", "selection", "positions"):
            values, wanted = getattr(step, name), cut(composition, number, getattr(own, name))
            assert (values is None) == (wanted is None)
            if values is not None:
                assert bit_equal(values[rows], wanted), (composition.kinds[number], name)
        assert torch.equal(step.sink, own.sink)
    assert seen == len(composition.scenario.steps) + composition.kinds.count("dup")


def test_the_needles_keys_are_those_of_the_needle_alone(composed):
    _, composition = composed
    for number, rows, own in slices(composition):
        step = composition.scenario.steps[number]
        request = int(step.request[rows][0])
        for name in ("token", "entry"):
            base = getattr(step, f"{name}_base")
            bank = {"token": step.tokens, "entry": step.entries}[name][base[request] : base[request + 1]]
            wanted = {"token": own.tokens, "entry": own.entries}[name]
            assert bit_equal(bank, wanted[: len(bank)])
            if name == "token":
                assert len(wanted) - len(bank) == own.positions[-1] - step.positions[rows][-1]


def test_history_lies_where_the_tables_say(composed):
    """What is stored before a step is, at the needle's locations, the needle's history."""
    _, composition = composed
    for number, rows, own in slices(composition):
        if composition.own_step[number] or composition.part[number].start:
            continue  # later steps of a chain and later chunks find their history stored
        step, placement = composition.scenario.steps[number], composition.scenario.placements[number]
        request = int(step.request[rows][0])
        table = placement.req_to_token[placement.batch.req_pool_indices[request]].long()
        stored = dict(zip(placement.history_loc.tolist(), placement.history_k, strict=True))
        prefix = own.prefix_lens[0]
        assert torch.equal(stored[int(table[prefix - 1])], own.tokens[prefix - 1])
        assert torch.equal(placement.batch.out_cache_loc[rows], table[step.positions[rows]])
        if own.ratio:
            entries = dict(zip(placement.entry_loc.tolist(), placement.entry_k, strict=True))
            assert torch.equal(entries[int(table[own.ratio - 1])], own.entries[0])


def test_only_the_poisoned_neighbour_holds_nan(composed):
    _, composition = composed
    for kind, step, places in zip(composition.kinds, composition.scenario.steps, composition.rows, strict=True):
        poisoned = step.q.isnan().flatten(1).any(1)
        assert bool(poisoned.any()) == (kind == "nan-neighbour")
        for rows in places:
            assert not poisoned[rows].any()


def test_fillers_and_pages_follow_their_seed(composed):
    case, composition = composed
    other = made(case.id, 4)
    at = composition.kinds.index("middle")
    rows = composition.rows[at][0]
    assert not torch.equal(other.scenario.steps[at].q[: rows.start], composition.scenario.steps[at].q[: rows.start])
    assert torch.equal(other.scenario.steps[at].q[rows], composition.scenario.steps[at].q[rows])
    again = made(case.id, 3)
    assert torch.equal(again.scenario.placements[at].history_loc, composition.scenario.placements[at].history_loc)


def test_the_needle_has_keys_enough_to_be_split():
    for case in CASES.values():
        if case.kind == "case" and has_needle(case):
            steps = case.variant.num_steps - 1 if case.cell.mode == DRAFT_RUNNER else 1
            alone = compose(case, MATRIX, "cpu", (ALONE,), 0).alone
            assert len(alone.steps) == steps
            assert alone.steps[0].prefix_lens[0] >= 256, case.id


def test_a_prefill_is_cut_into_chunks_that_go_on_where_the_last_ended():
    case = CASES["r4-eager-extend"]  # 16 rows behind 320 tokens
    assert kinds_around(case.variant)[-1] == "chunk-5"
    chunks = compose(case, MATRIX, "cpu", ("middle", "chunk-5"), 3)
    assert chunks.kinds == ("middle", *["chunk-5"] * 4)
    assert [step.q.shape[0] for step in chunks.scenario.steps[1:]] == [5, 5, 5, 1]
    assert [step.prefix_lens for step in chunks.scenario.steps[1:]] == [(320,), (325,), (330,), (335,)]
    assert [len(placement.history_loc) > 0 for placement in chunks.scenario.placements[1:]] == [
        True,
        False,
        False,
        False,
    ]
    positions = torch.cat([step.positions for step in chunks.scenario.steps[1:]])
    assert torch.equal(positions, chunks.alone.steps[0].positions)


def test_what_cannot_be_composed_is_refused():
    case = CASES["r0-eager-decode-within-window"]
    for kind in ("frist", "chunk-0", "chunk-x"):
        with pytest.raises(ValueError, match=f"no composition is called {kind}; there are alone, first"):
            compose(case, MATRIX, "cpu", (kind,), 0)
    with pytest.raises(ValueError, match="chunk-2 is of a prefill, this is decode"):
        compose(case, MATRIX, "cpu", ("chunk-2",), 0)
    with pytest.raises(ValueError, match="no request"):
        compose(CASES["r0-eager-decode-idle"], MATRIX, "cpu", (ALONE,), 0)
    assert not has_needle(replace(case, variant=None))
