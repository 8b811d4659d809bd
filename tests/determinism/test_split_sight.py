"""Which inputs would show a split that follows the batch: many keys near zero would, one key cannot."""

from __future__ import annotations

import dsv4_reference
import pytest

from dsv4_matrix.cases.batch import plan_steps
from dsv4_matrix.cases.build import assemble
from dsv4_matrix.cases.compose import compose
from dsv4_matrix.cases.queries import FINE, USUAL
from dsv4_matrix.cases.turns import ALONE
from dsv4_matrix.declaration import Case, Variant, find_matrix, load_matrix
from dsv4_matrix.judge.split_sight import LEAST, split_sight

MATRIX = load_matrix(find_matrix())


def share(ratio, prefix, roles):
    variant = Variant("sight", "decode", (prefix,), heads=64)
    case = Case(f"r{ratio}-sight-{prefix}", "case", MATRIX.cell(f"r{ratio}/eager"), variant)
    scenario = assemble(case, plan_steps("eager", variant), MATRIX, "cpu", roles)
    return split_sight(scenario.steps[0], dsv4_reference)


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_a_row_of_one_key_shows_nothing(ratio):
    assert share(ratio, 0, FINE) == 0


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_fine_queries_show_more_than_the_usual_ones(ratio):
    assert share(ratio, 400, FINE) > max(LEAST, share(ratio, 400, USUAL))


@pytest.mark.parametrize(
    "case_id", ["r0-eager-extend-page-below", "r4-cg-decode-around-topk", "r128-verify-cg-chain-3"]
)
def test_needles_are_sensitive(case_id):
    case = next(case for case in MATRIX.cases() if case.id == case_id)
    alone = compose(case, MATRIX, "cpu", (ALONE,), 0).alone
    assert split_sight(alone.steps[0], dsv4_reference) >= LEAST
