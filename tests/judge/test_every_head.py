"""No head stands in for another: each can fail by itself, in some case of each ratio that has so many heads."""

from collections import defaultdict

import dsv4_reference
import numpy as np
import pytest
import torch

from dsv4_matrix.cases import queries
from dsv4_matrix.cases.build import build_scenario
from dsv4_matrix.declaration import find_matrix, load_matrix
from dsv4_matrix.judge.sensitivity import without_sink
from dsv4_matrix.judge.sight import NO_SINK, sight_of
from dsv4_matrix.judge.truth import Oracle

MATRIX = load_matrix(find_matrix())
#: Cases by number of heads and ratio, the cheapest first: those whose sinks weigh, and those of 32 heads.
CASES = defaultdict(list)
for _case in sorted(MATRIX.cases("cpu"), key=lambda case: case.variant.cost if case.variant else 0):
    if _case.kind == "case" and _case.variant.sink != "off":
        CASES[_case.variant.heads, _case.cell.ratio].append(_case)


def moved(oracle, truth):
    """What each mistake in a head makes of its output: the mistake's name and fp64 ``[t, H, 512]``."""
    neighbour = torch.arange(truth.out.shape[1]) ^ 1
    if bool((oracle.step.sink > NO_SINK).all()):
        yield "sink left out", without_sink(oracle, truth)
    yield "zeroed", torch.zeros_like(truth.out)
    yield "swapped with its neighbour", truth.out[:, neighbour]


def blind_heads(cases):
    """By mistake, the heads in which it stays within every budget of every row of ``cases``; stops where none is."""
    best = defaultdict(lambda: torch.tensor(0.0, dtype=torch.float64))
    for case in cases:
        for step in build_scenario(case, MATRIX, "cpu").steps:
            oracle = Oracle.of(dsv4_reference, step, sight_of(step, dsv4_reference), MATRIX.tolerances.budget)
            for truth in map(oracle.truth, oracle.chunks()):
                for name, output in moved(oracle, truth):
                    error = (output - truth.out).abs()
                    of_max = error.amax(dim=-1) / truth.max_budget
                    of_mean = error.mean(dim=-1) / truth.mean_budget
                    effect = torch.maximum(of_max, of_mean).nan_to_num(nan=0.0).amax(dim=0)
                    best[name] = torch.maximum(best[name], effect)
        if all(bool((effect > 1).all()) for effect in best.values()):
            break
    return {name: (effect <= 1).nonzero()[:, 0].tolist() for name, effect in best.items()}


def test_all_counts_of_heads_have_cases_of_each_ratio():
    assert {(heads, ratio) for heads in (64, 128) for ratio in (0, 4, 128)} <= set(CASES)


@pytest.mark.parametrize(("heads", "ratio"), sorted(CASES))
def test_each_head_can_fail_by_itself(heads, ratio):
    assert blind_heads(CASES[heads, ratio]) == {"sink left out": [], "zeroed": [], "swapped with its neighbour": []}


def test_a_head_with_one_role_in_all_rows_is_found(monkeypatch):
    """As roles once were: heads 6 mod 8 are hot in every row of every case, so that no sink of theirs is missed."""
    monkeypatch.setattr(queries, "_place_of", lambda rows, heads, *_: np.tile(np.arange(heads), (rows, 1)))
    assert blind_heads(CASES[64, 4])["sink left out"] == list(range(6, 64, 8))


def test_a_peaked_head_far_above_its_sink_is_found(monkeypatch):
    """Without peaked queries that respect the sink, 128 heads in two rows do not suffice."""
    monkeypatch.setattr(queries, "_SINK_REACH", 100.0)
    assert blind_heads(CASES[128, 4])["sink left out"]
