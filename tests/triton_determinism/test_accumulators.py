"""Accumulators are what the answer was made of, of the rows that keep any, and only of their own splits."""

from __future__ import annotations

import pytest
import torch
from dsv4_triton import DSV4TritonBackend, attention

from dsv4_matrix.cases.compose import compose
from dsv4_matrix.declaration import find_matrix, load_matrix
from dsv4_matrix.modes.accumulated import drive_accumulators
from dsv4_matrix.modes.composed import drive_composition
from dsv4_matrix.modes.errors import BackendError

MATRIX = load_matrix(find_matrix())
CASES = {case.id: case for case in MATRIX.cases()}
#: A needle of 641 keys, one more than a split has.
SPLIT = CASES["r128-eager-decode-heads-16"]


@pytest.fixture(scope="module")
def composition(device):
    return compose(SPLIT, MATRIX, device, ("alone", "long-neighbour"), 1)


def test_they_make_the_answer(composition, device):
    rows, violations = drive_accumulators(composition, DSV4TritonBackend)
    assert violations == ()
    assert [(row.kind, row.step, row.row) for row in rows] == [("alone", 0, 0), ("long-neighbour", 0, 0)]
    _, answers = drive_composition(SPLIT, composition, DSV4TritonBackend, device)
    for row, answer in zip(rows, answers, strict=True):
        assert row.values.shape == (2, 16, 514)
        acc, top, total = row.values[..., :512].double(), row.values[..., 512].double(), row.values[..., 513].double()
        weight = torch.exp2(top - top.amax(0))
        mass = (total * weight).sum(0)
        lse = (top.amax(0) + torch.log2(mass)) * torch.log(torch.tensor(2.0, dtype=torch.float64))
        seen = answer.observation
        assert torch.allclose(lse.float(), seen.lse[0], rtol=1e-5, atol=1e-5)
        sink = torch.exp(composition.alone.steps[0].sink.double() - lse)
        out = (acc * weight[..., None]).sum(0) / (mass * (1 + sink))[:, None]
        assert torch.allclose(out.float(), seen.out[0].float(), rtol=2**-7, atol=1e-4)


def test_a_row_of_one_split_keeps_none(device):
    kept = []

    class Watched(DSV4TritonBackend):
        def forward_with_accumulators(self, *arguments):
            out, lse, rows = super().forward_with_accumulators(*arguments)
            kept.append([None if row is None else tuple(row.shape) for row in rows])
            return out, lse, rows

    drive_accumulators(compose(SPLIT, MATRIX, device, ("short-neighbour",), 1), Watched)
    assert kept == [[(2, 16, 514), None]]


def test_a_needle_without_any_is_asked_once(device):
    calls = []

    class Counted(DSV4TritonBackend):
        def forward_with_accumulators(self, *arguments):
            calls.append(1)
            return super().forward_with_accumulators(*arguments)

    composed = compose(CASES["r0-eager-decode-heads-16"], MATRIX, device, ("alone", "middle", "last"), 1)
    assert drive_accumulators(composed, Counted) == ((), ())
    assert len(calls) == 1


def test_a_backend_that_gives_none_is_left_alone(composition):
    class Silent:
        def __init__(self, runner):
            del runner

    assert drive_accumulators(composition, Silent) == ((), ())


@pytest.mark.parametrize(("kept", "told"), [(slice(0, 2), r"\(torch.bfloat16 \[.*\)"), (0, "torch.bfloat16 .*")])
def test_a_backend_that_returns_something_else_is_told_what_it_owes(composition, kept, told):
    class Short(DSV4TritonBackend):
        def forward_with_accumulators(self, *arguments):
            return super().forward_with_accumulators(*arguments)[kept]

    with pytest.raises(BackendError, match=rf"must return \(out, lse, accumulators\), .*; got {told}"):
        drive_accumulators(composition, Short)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda kept: None, "got NoneType for it"),
        (lambda kept: kept[1:], "for each of 1 rows; got one of 0"),
    ],
)
def test_accumulators_that_are_not_one_for_each_row_are_told(composition, change, told):
    class Uneven(DSV4TritonBackend):
        def forward_with_accumulators(self, *arguments):
            out, lse, kept = super().forward_with_accumulators(*arguments)
            return out, lse, change(kept)

    with pytest.raises(BackendError, match=told):
        drive_accumulators(composition, Uneven)


def test_the_kernel_is_its_own_again(composition):
    sound = attention.combine
    drive_accumulators(composition, DSV4TritonBackend)
    assert attention.combine is sound
