"""How few rows are shared among programs: arithmetic that needs no GPU. What comes out is tested in ``test_hopper``."""

from __future__ import annotations

import pytest
from dsv4_triton.workload import Workload


def shares(*arguments):
    from dsv4_triton.hopper.few_rows import launch as few_rows

    return few_rows.shares(*arguments)


def serves(rows, splits, processors=132, chunk=None):
    from dsv4_triton.hopper.few_rows import launch as few_rows

    work = Workload(rows, chunk or rows, 20 * splits, splits, None, None, None, None, 0, 0, None)
    return few_rows.serves(work, processors)


def second(kind, rows, halves):
    """Programs of the second kernel."""
    from dsv4_triton.hopper.few_rows import launch as few_rows

    return rows * (few_rows.SLICES.value if kind == "stream" else halves * few_rows.PROGRAMS[kind])


@pytest.mark.parametrize("processors", [132, 114, 78])
@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("row_blocks", [1, 2, 10, 18, 20])
def test_programs_of_both_kernels(processors, halves, row_blocks):
    served = [rows for rows in range(1, 200) if serves(rows, 1, processors)]
    assert served == list(range(1, processors // 4 + 1))
    kinds = set()
    for rows in served:
        kind, programs = shares(rows, halves, row_blocks, processors)
        kinds.add(kind)
        assert 1 <= programs <= row_blocks
        assert rows * programs <= processors, "one after the other they would take several turns"
        assert second(kind, rows, halves) <= processors
        if kind == "narrow":
            assert rows * programs + second(kind, rows, halves) <= processors, "only where both are there at once"
            assert programs == row_blocks
    assert kinds == {"narrow", "wide", "stream"}


def test_programs_that_wait_for_a_place_make_no_weights():
    """Of the second kernel's programs those that find none are the last ones."""
    from dsv4_triton.hopper.few_rows.launch import PROGRAMS, makers

    assert makers(1, 1, "narrow", 18, 132) == 2 * PROGRAMS["narrow"]
    assert makers(4, 1, "wide", 18, 132) == 2 * PROGRAMS["wide"]
    assert makers(4, 2, "wide", 18, 132) == PROGRAMS["wide"], "72 and 64 programs"


def test_one_row_has_a_program_for_each_block():
    assert shares(1, 1, 18, 132) == ("narrow", 18)
    assert shares(4, 1, 18, 132) == ("wide", 18)
    assert shares(4, 2, 18, 132) == ("wide", 18), "four programs of the second kernel wait for one of the first"
    assert shares(16, 1, 18, 132) == ("wide", 8)
    assert shares(32, 1, 18, 132) == ("stream", 4)
    assert shares(9, 2, 18, 132) == ("stream", 14)


@pytest.mark.parametrize(
    ("rows", "splits", "served"), [(1, 1, True), (33, 1, True), (34, 1, False), (4, 7, True), (5, 7, False)]
)
def test_which_calls_are_of_few_rows(rows, splits, served):
    assert serves(rows, splits) == served
    assert not serves(rows, splits, chunk=rows - 1 or 2), "its workspace is for less"
