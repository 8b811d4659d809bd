"""Call sites: those that a declaration may name are those that the harness can drive, and each speaks for its cells."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4_matrix.cases.batch import GRAPH_MODES
from dsv4_matrix.declaration.drives import DRIVES
from dsv4_matrix.declaration.sites import CALL_SITES, DRIVEN, OWN_STEP, RATIOS, sites_of_cell, sites_outside_cells
from dsv4_matrix.modes.sites import SITES

EAGER_MODES = {"eager", "verify-eager", "de-eager"}


def test_every_declared_site_is_implemented_and_no_other() -> None:
    assert {*SITES, OWN_STEP} == set(CALL_SITES)


def test_descriptions_are_one_line_each() -> None:
    assert all(site.does and "\n" not in site.does and len(site.does) < 100 for site in CALL_SITES.values())


def test_own_step_is_for_the_modes_that_have_a_driver() -> None:
    assert set(DRIVEN) == GRAPH_MODES | EAGER_MODES


def test_the_page_names_the_modes_without_a_driver() -> None:
    page = (Path(__file__).parents[2] / "docs" / "declaration.md").read_text(encoding="utf-8")
    promote = page.split("**Promote a cell.**")[1].split("What a driver takes")[0]
    assert {mode for mode in DRIVES if f"`{mode}`" in promote} == set(DRIVES) - set(DRIVEN)


@pytest.mark.parametrize("mode", DRIVES)
@pytest.mark.parametrize("ratio", RATIOS)
def test_every_cell_has_a_site_but_the_one_that_every_probe_needs(ratio: int, mode: str) -> None:
    assert bool(sites_of_cell(ratio, mode)) == ((ratio, mode) != (0, "eager"))


def test_a_site_speaks_for_cells_or_for_an_edge_outside_them() -> None:
    of_cells = {name for ratio in RATIOS for mode in DRIVES for name in sites_of_cell(ratio, mode)}
    assert of_cells | set(sites_outside_cells()) == set(CALL_SITES)
    assert not of_cells & set(sites_outside_cells())


def test_sites_of_a_compressed_layer_say_nothing_about_ratio_0() -> None:
    assert sites_of_cell(0, "de-eager") == (OWN_STEP,)
    assert sites_of_cell(4, "de-eager") == (OWN_STEP, "draft-extend-compressed")
