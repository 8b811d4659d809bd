"""What a worker leaves is what the controlling process reads, and nothing of a worker on another machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4_matrix.shard.notes import (
    NOTES,
    Found,
    note_path,
    read_found,
    read_refusal,
    write_found,
    write_refusal,
)

MACHINE = {"kind": "gpu", "model": "NVIDIA H200"}
KERNELS = [{"call": "attention", "kernel": "fast", "why": "64 heads"}]


def node(worker: str, notes: Path | None) -> Any:
    """As much of an xdist WorkerController as tells who it is, and where it leaves notes."""
    env = {} if notes is None else {NOTES: str(notes)}
    return SimpleNamespace(gateway=SimpleNamespace(id=worker, spec=SimpleNamespace(env=env)))


def test_each_replacement_has_a_note_of_its_own(tmp_path: Path) -> None:
    assert note_path(tmp_path, "gw0") != note_path(tmp_path, "gw2")


@pytest.mark.parametrize("found", [Found({"t.py::test[a]": "a"}, MACHINE, KERNELS), Found({})])
def test_what_was_found_is_read_as_written(tmp_path: Path, found: Found) -> None:
    write_found(tmp_path, "gw0", Found({"t.py::test[b]": "b"}))
    write_found(tmp_path, "gw1", found)
    told = read_found(node("gw1", tmp_path))
    assert told is not None
    assert (told.cases, told.machine, list(told.kernels)) == (found.cases, found.machine, list(found.kernels))


def test_a_refusal_is_of_the_worker_that_left_it(tmp_path: Path) -> None:
    write_refusal(tmp_path, "gw1", "backend µ: does not import")
    assert read_refusal(node("gw1", tmp_path)) == "backend µ: does not import"
    assert read_refusal(node("gw0", tmp_path)) == ""


def test_a_worker_on_another_machine_leaves_nothing() -> None:
    assert read_found(node("gw0", None)) is None
    assert read_refusal(node("gw0", None)) == ""
