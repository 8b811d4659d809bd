"""What a worker's environment says before it imports anything."""

from __future__ import annotations

from pathlib import Path

import execnet
import pytest

from dsv4_matrix.shard.notes import NOTES
from dsv4_matrix.shard.workers import PLACE, cache_folder, place_of, prepare


def specs(*texts: str) -> list[execnet.XSpec]:
    return [execnet.XSpec(text) for text in texts]


def test_place_gpu_notes_and_cache_of_each(tmp_path: Path) -> None:
    workers = specs("popen", "popen")
    prepare(workers, ("3", "GPU-ab/cd"), {"TRITON_CACHE_DIR": "/cache"}, tmp_path)
    assert [place_of(worker.env) for worker in workers] == [0, 1]
    assert [worker.env["CUDA_VISIBLE_DEVICES"] for worker in workers] == ["3", "GPU-ab/cd"]
    assert [worker.env["TRITON_CACHE_DIR"] for worker in workers] == [
        "/cache/dsv4-matrix-gpu-3",
        "/cache/dsv4-matrix-gpu-GPU-ab_cd",
    ]
    assert {worker.env[NOTES] for worker in workers} == {str(tmp_path)}


def test_without_gpus_nothing_is_pinned(tmp_path: Path) -> None:
    workers = specs("popen", "popen")
    prepare(workers, (), {}, tmp_path)
    assert all(worker.env.keys() == {PLACE, NOTES} for worker in workers)


def test_one_worker_keeps_the_users_cache(tmp_path: Path) -> None:
    (worker,) = specs("popen")
    prepare([worker], ("0",), {}, tmp_path)
    assert "TRITON_CACHE_DIR" not in worker.env


def test_what_the_user_pinned_and_other_machines_are_left_alone(tmp_path: Path) -> None:
    workers = specs("popen//env:CUDA_VISIBLE_DEVICES=7", "ssh=somewhere")
    prepare(workers, ("0", "1"), {}, tmp_path)
    assert workers[0].env["CUDA_VISIBLE_DEVICES"] == "7"
    assert workers[1].env == {PLACE: "1"}


def test_no_two_workers_share_a_cache() -> None:
    gpus = ("0", "1", "0", "1", "0")
    folders = [cache_folder({"TRITON_HOME": "/home"}, gpus, place) for place in range(5)]
    assert len(set(folders)) == 5
    assert folders[0] == Path("/home/.triton/cache/dsv4-matrix-gpu-0")
    assert folders[4].name == "dsv4-matrix-gpu-0-3"


def test_an_unprepared_worker_has_no_place() -> None:
    with pytest.raises(KeyError):
        place_of({})
