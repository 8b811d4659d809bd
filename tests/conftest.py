"""Before any test module is imported: Triton's interpreter where there is no GPU, and one thread for CPU sums."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from dsv4_matrix.machine import find_machine
from dsv4_matrix.shard.notes import NOTES
from dsv4_matrix.shard.workers import PLACE

find_machine()

# Property tests draw the same examples in every run; a failing one prints its own reproduction.
settings.register_profile("repository", derandomize=True, deadline=None, database=None)
settings.load_profile("repository")


@pytest.fixture(autouse=True)
def _not_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pytest that a test starts is nobody's worker, also where this one is."""
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST_") or name in (PLACE, NOTES)]:
        monkeypatch.delenv(name)


@pytest.fixture
def import_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder to import from; what was imported from it is forgotten afterwards."""
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]
