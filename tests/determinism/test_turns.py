"""Which batches a needle stands in: names, lengths and turns, before there is any tensor."""

from __future__ import annotations

import pytest

from dsv4_matrix.cases.turns import ALONE, KINDS, kinds_around, needle_of, step_plans, turns_of
from dsv4_matrix.declaration import find_matrix, load_matrix

CASES = {case.id: case for case in load_matrix(find_matrix()).cases("cpu")}


def prefixes(case_id, *kinds, steps=1):
    """Prefix of each request in each step, of all kinds."""
    case = CASES[case_id]
    prefix, rows = needle_of(case.variant)
    plans = step_plans(case.variant, [turns_of(case, kind, rows, steps) for kind in kinds], prefix)
    return [tuple(span.prefix for span in plan.spans) for plan in plans]


def test_the_needle_stands_where_its_kind_says_and_grows_to_a_page():
    assert needle_of(CASES["r0-eager-decode-within-window"].variant)[0] > 256
    needle = needle_of(CASES["r4-eager-extend"].variant)[0]
    assert needle == 320
    found = prefixes("r4-eager-extend", ALONE, "first", "middle", "last", "dup", "empty-neighbour")
    assert found == [(320,), (320, 70, 131), (70, 320, 131), (70, 131, 320), (320, 70, 320), (0, 320, 0)]


def test_a_chain_goes_on_by_one_token_a_step_under_the_same_tables():
    case = CASES["r0-eagle-draft-runner-chain-3-steps"]
    prefix, rows = needle_of(case.variant)
    assert prefixes(case.id, "short-neighbour", steps=2) == [(prefix, 2), (prefix + 1, 3)]
    groups = [turns_of(case, kind, rows, 2) for kind in (ALONE, "dup")]
    plans = step_plans(case.variant, groups, prefix)
    assert [plan.group for plan in plans] == [0, 0, 1, 1]
    assert [[span.request for span in plan.spans] for plan in plans] == [[0], [0], [1, 2, 3], [1, 2, 3]]


def test_a_chunk_is_of_the_needle_alone_and_the_last_one_is_shorter():
    case = CASES["r4-eager-extend"]
    turns = turns_of(case, "chunk-5", needle_of(case.variant)[1], 1)
    assert [turn.part for turn in turns] == [slice(0, 5), slice(5, 10), slice(10, 15), slice(15, 16)]
    assert [turn.count for turn in turns] == [5, 5, 5, 1]
    assert {turn.names for turn in turns} == {("N",)}
    assert prefixes(case.id, "chunk-5") == [(320,), (325,), (330,), (335,)]


@pytest.mark.parametrize("case_id", ["r0-eager-extend-page-above", "r4-cg-decode-emissions", "r0-de-eager-uniform"])
def test_what_has_no_chunks(case_id):
    """One row, a decode, and a draft extend, which is never cut."""
    assert set(kinds_around(CASES[case_id].variant)) == set(KINDS) - {ALONE}
