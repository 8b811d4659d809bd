"""Probe sites: those that a declaration may name and those that the harness can drive are the same."""

from __future__ import annotations

from dsv4_matrix.declaration.sites import SITE_NAMES
from dsv4_matrix.modes.sites import SITES


def test_every_declared_site_is_implemented_and_no_other() -> None:
    assert set(SITES) == set(SITE_NAMES)


def test_descriptions_are_one_line_each() -> None:
    assert all(text and "\n" not in text and len(text) < 100 for text in SITE_NAMES.values())
