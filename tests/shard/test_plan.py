"""Plans: disjoint, complete, balanced as far as cells allow, the same in every process, and never degenerate."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_matrix.declaration import find_matrix, load_matrix
from dsv4_matrix.declaration.model import Matrix
from dsv4_matrix.shard.cost import cost_of
from dsv4_matrix.shard.plan import (
    PlanError,
    Shard,
    Unit,
    cases_of_shard,
    divide,
    divide_tests,
    parse_shard,
    shards_of,
    units_of,
)

ROOT = Path(__file__).parents[2]

names = st.text("abcdefghijklmnopqrstuvwxyz0123456789-/", min_size=1, max_size=12)
units = st.dictionaries(names, st.integers(1, 10_000), min_size=1, max_size=40).map(
    lambda costs: [Unit(name, cost, (name,)) for name, cost in costs.items()]
)


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return load_matrix(find_matrix(ROOT))


@given(units, st.integers(1, 16))
def test_places_are_disjoint_and_complete(units: list[Unit], places: int) -> None:
    planned = [unit for place in divide(units, places) for unit in place]
    assert sorted(planned, key=lambda u: u.id) == sorted(units, key=lambda u: u.id)


@given(units, st.integers(1, 16), st.randoms(use_true_random=False))
def test_order_of_arrival_does_not_matter(units: list[Unit], places: int, random: object) -> None:
    shuffled = list(units)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert divide(shuffled, places) == divide(units, places)


@given(units, st.integers(1, 16))
def test_no_place_is_empty_while_units_last(units: list[Unit], places: int) -> None:
    used = sum(bool(place) for place in divide(units, places))
    assert used == min(places, len(units))


@given(units, st.integers(1, 16))
def test_load_is_within_the_bound_of_greedy_plans(units: list[Unit], places: int) -> None:
    """Graham's bound: the last unit went to the place with least, so all others had at least as much without it."""
    loads = [sum(unit.cost for unit in place) for place in divide(units, places)]
    total, longest = sum(unit.cost for unit in units), max(unit.cost for unit in units)
    assert max(loads) * places <= total + longest * (places - 1)


@given(units, st.integers(1, 4), st.integers(1, 4))
def test_second_level_uses_every_worker(units: list[Unit], shards: int, workers: int) -> None:
    """Reusing crc32 modulo for both levels would send all of a shard to one worker."""
    for shard in divide(units, shards):
        used = sum(bool(place) for place in divide(shard, workers))
        assert used == min(workers, len(shard))


def test_ties_fall_by_crc32_then_id() -> None:
    equal = [
        Unit(name, 7, ()) for name in ("b", "a", "d", "c")
    ]  # crc32: c 06b9df6f, b 71beeff9, d 98dd4acc, a e8b7be43
    assert [[unit.id for unit in place] for place in divide(equal, 4)] == [["c"], ["b"], ["d"], ["a"]]


def test_longest_first_beats_the_order_of_the_file() -> None:
    units = [Unit("a", 1, ()), Unit("b", 1, ()), Unit("c", 2, ())]
    assert [sum(u.cost for u in place) for place in divide(units, 2)] == [2, 2]


def test_a_unit_twice_is_refused() -> None:
    with pytest.raises(PlanError, match="twice"):
        divide([Unit("a", 1, ()), Unit("a", 2, ())], 2)


def test_no_place_at_all_is_refused() -> None:
    with pytest.raises(PlanError, match="at least one"):
        divide([], 0)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("total", [1, 2, 3, 4, 8])
def test_shards_of_the_declaration(matrix: Matrix, device: str, total: int) -> None:
    cases = matrix.cases(device)
    parts = [cases_of_shard(cases, device, Shard(index, total)) for index in range(1, total + 1)]
    assert sorted(case.id for part in parts for case in part) == [case.id for case in cases]
    cells = [{case.cell_id for case in part} for part in parts]
    assert not any(a & b for i, a in enumerate(cells) for b in cells[:i]), "a cell is never divided"


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("total", [2, 3, 4])
def test_shards_of_the_declaration_are_balanced(matrix: Matrix, device: str, total: int) -> None:
    cases = matrix.cases(device)
    parts = [cases_of_shard(cases, device, Shard(index, total)) for index in range(1, total + 1)]
    loads = [sum(cost_of(case, device) for case in part) for part in parts]
    assert max(loads) <= 1.1 * sum(loads) / total


def test_a_unit_weighs_what_its_cases_do(matrix: Matrix) -> None:
    for device in ("cpu", "gpu"):
        unit = next(unit for unit in units_of(matrix.cases(device), device) if unit.id == "r4/cg-decode")
        assert unit.cost == sum(cost_of(case, device) for case in matrix.cases(device) if case.id in unit.cases)


@pytest.mark.parametrize("workers", [2, 4])
def test_workers_of_a_gpu_machine_have_the_same_number_of_steps(matrix: Matrix, workers: int) -> None:
    """Row-blocks alone gave one of two workers a fifth more of what a GPU takes time for."""
    cases = matrix.cases("gpu")
    nodeids = [f"test_cells.py::test_cell[{case.id}]" for case in cases]
    places = divide_tests(nodeids, dict(zip(nodeids, cases, strict=True)), "gpu", workers)
    loads = [sum(cost_of(cases[index], "gpu") for index in place) for place in places]
    assert max(loads) <= 1.05 * sum(loads) / workers
    by_blocks = divide_tests(nodeids, dict(zip(nodeids, cases, strict=True)), "cpu", workers)
    assert max(sum(cost_of(cases[index], "gpu") for index in place) for place in by_blocks) > max(loads)


def test_more_shards_than_cells_is_refused(matrix: Matrix) -> None:
    cells = len(units_of(matrix.cases("gpu"), "gpu"))
    with pytest.raises(PlanError, match=f"give at most {cells}"):
        shards_of(matrix.cases("gpu"), "gpu", cells + 1)


@pytest.mark.parametrize(
    ("total", "told"),
    [
        (2, "2 shards for 1 covered cell: none of these is divided, so 1 shard would run nothing"),
        (3, "so 2 shards would"),
    ],
)
def test_shards_are_counted_in_words(matrix: Matrix, total: int, told: str) -> None:
    cases = [case for case in matrix.cases("gpu") if case.cell_id == "r4/cg-decode"]
    with pytest.raises(PlanError, match=told):
        shards_of(cases, "gpu", total)
    with pytest.raises(PlanError, match=r"^1 shard for nothing: .* so 1 shard would run nothing"):
        shards_of([], "gpu", 1)


@pytest.mark.parametrize("text", ["0/4", "5/4", "1/0", "1", "a/b", "1/2/3", "-1/4", "1.0/2", "", "٢/٤", "1/99999"])
def test_bad_shards_are_refused(text: str) -> None:
    with pytest.raises(PlanError):
        parse_shard(text)


def test_shards_count_from_one() -> None:
    assert parse_shard(" 4/4 ") == Shard(4, 4)
    assert str(Shard(2, 4)) == "2/4"


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_tests_without_a_case_stay_together_by_file(matrix: Matrix, device: str) -> None:
    cases = matrix.cases(device)
    nodeids = [f"tests/test_{file}.py::test_{k}" for file in "ab" for k in range(3)]
    nodeids += [f"test_cells.py::test_cell[{case.id}]" for case in cases]
    lists = divide_tests(nodeids, {f"test_cells.py::test_cell[{case.id}]": case for case in cases}, device, 5)
    assert sorted(index for place in lists for index in place) == list(range(len(nodeids)))
    for group in (range(3), range(3, 6)):
        assert sum(bool(set(group) & set(place)) for place in lists) == 1
    assert all(list(place) == sorted(place) for place in lists)


PLAN = """
from pathlib import Path
from dsv4_matrix.declaration import load_matrix
from dsv4_matrix.shard.plan import shards_of
import sys
assert "torch" not in sys.modules and "triton" not in sys.modules
cases = load_matrix(Path("matrix.yaml")).cases("gpu")
print([[unit.id for unit in shard] for shard in shards_of(set(cases), "gpu", 5)])
"""


def test_same_plan_under_any_hash_seed_and_locale() -> None:
    plans = {
        subprocess.run(
            [sys.executable, "-c", PLAN.replace("set(", order)],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": locale},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, locale, order in (("0", "C", "list("), ("1", "C.UTF-8", "reversed("), ("random", "C", "list("))
    }
    assert len(plans) == 1
