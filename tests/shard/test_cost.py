"""What a case weighs: row-blocks where it is interpreted, and steps of the host besides where there is a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4_matrix.cases.batch import plan_steps
from dsv4_matrix.declaration import find_matrix, load_matrix
from dsv4_matrix.declaration.model import Case, Cell, Probe, State, Variant
from dsv4_matrix.shard.cost import CASE_COST, PROBE_COST, STEP_COST, cost_of, other_test_cost


def case(mode: str, **fields: object) -> Case:
    variant = Variant("x", **{"forward": "decode", "prefix_lens": (64,), "cost": 70, **fields})  # type: ignore[arg-type]
    return Case("r0-x", "case", cell=Cell(0, mode, State.COVERED, (variant,)), variant=variant)


@pytest.mark.parametrize(
    ("mode", "fields", "steps"),
    [
        ("eager", {}, 1),
        ("cg-decode", {"replays": ((64,), (), (65,))}, 4),
        ("eagle-draft-runner", {"num_steps": 4, "replays": ((64,),)}, 6),
        ("verify-eager", {"forward": "target-verify", "extend_lens": (4,), "accept_lens": (2,)}, 2),
    ],
)
def test_a_gpu_weighs_steps(mode: str, fields: dict[str, object], steps: int) -> None:
    made = case(mode, **fields)
    assert cost_of(made, "cpu") == 70
    assert cost_of(made, "gpu") == 70 + CASE_COST + STEP_COST * steps


def test_steps_are_those_that_a_case_drives() -> None:
    """Counted from the declaration by a formula of its own, which has to agree with the plan that cases run by."""
    for made in load_matrix(find_matrix(Path(__file__).parents[2])).cases("gpu"):
        if made.cell is not None and made.variant is not None:
            driven = len(plan_steps(made.cell.mode, made.variant))
            assert cost_of(made, "gpu") == made.variant.cost + CASE_COST + STEP_COST * driven, made.id


def test_a_probe_weighs_little_everywhere() -> None:
    probe = Case("r0-eager-refused", "probe", probe=Probe("page-size", "AssertionError", "page"))
    assert cost_of(probe, "gpu") == cost_of(probe, "cpu") == PROBE_COST


def test_another_test_weighs_like_a_case_of_its_device() -> None:
    """In one plan with cases: next to nothing on a GPU, it would be heaped on one worker."""
    assert other_test_cost("cpu") < cost_of(case("eager"), "cpu") * 2
    assert (
        cost_of(case("eager"), "gpu") < other_test_cost("gpu") < cost_of(case("cg-decode", replays=((64,),) * 3), "gpu")
    )
