"""Roles of heads move, and with them what a head can show."""

import numpy as np
import pytest

from dsv4_matrix.cases.queries import USUAL, _place_of


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_in_eight_rows_each_head_has_each_role(heads):
    roles = np.array(list(USUAL))[_place_of(8, heads, 3, 0) % len(USUAL)]
    assert all(sorted(roles[:, head]) == sorted(USUAL) for head in range(heads))


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_a_row_has_every_place_once(heads):
    assert (np.sort(_place_of(5, heads, 2**32 - 1, 2), axis=1) == np.arange(heads)).all()


def test_places_move_with_the_seed_and_from_step_to_step():
    first = _place_of(1, 64, 8, 0)
    assert (first != _place_of(1, 64, 9, 0)).all()
    assert (first != _place_of(1, 64, 8, 1)).all()


@pytest.mark.parametrize("step", [0, 1])
def test_no_head_is_hot_in_two_rows_or_steps_on_end(step):
    hot = USUAL.index("h")
    places = _place_of(2, 64, 5, step) % len(USUAL)
    assert not ((places == hot).all(axis=0)).any()
