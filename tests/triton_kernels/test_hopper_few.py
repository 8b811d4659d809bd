"""How few rows are shared among programs: arithmetic that needs no GPU. What comes out is tested in ``test_hopper``."""

from __future__ import annotations

import pytest
from dsv4_triton.workload import Workload


def shares(*arguments):
    from dsv4_triton import hopper_few

    return hopper_few.shares(*arguments)


def serves(rows, splits, heads, processors=132):
    from dsv4_triton import hopper_few

    work = Workload(rows, rows, splits, None, None, None, None, 0, 0, None)
    return hopper_few.serves(work, heads, processors)


@pytest.mark.parametrize("processors", [132, 114, 78])
@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("row_blocks", [1, 2, 10, 18, 20])
def test_programs_of_both_kernels(processors, halves, row_blocks):
    from dsv4_triton import hopper_few

    for rows in range(1, processors // 8 // halves + 1):
        kind, programs = shares(rows, halves, row_blocks, processors)
        assert 1 <= programs <= row_blocks
        first, second = rows * programs, rows * halves * hopper_few.PROCESSORS[kind]
        assert first <= processors, "one after the other they would take several turns"
        assert second <= processors
        if kind == "one":
            assert first + second <= processors, "only where both are there at once"
            assert programs == row_blocks


def test_one_row_has_a_program_for_each_block():
    assert shares(1, 1, 18, 132) == ("one", 18)
    assert shares(4, 1, 18, 132) == ("wide", 18)
    assert shares(4, 2, 18, 132) == ("wide", 17), "17 programs a row leave room for the second kernel, 18 do not"
    assert shares(16, 1, 18, 132) == ("wide", 8)


@pytest.mark.parametrize(
    ("rows", "heads", "served"), [(1, 64, True), (16, 64, True), (17, 64, False), (8, 128, True), (9, 128, False)]
)
def test_which_calls_are_of_few_rows(rows, heads, served):
    assert serves(rows, 1, heads) == served
    assert not serves(rows, 2, heads), "a row of several splits is another matter"
