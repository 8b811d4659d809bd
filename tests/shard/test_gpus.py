"""The caller's own list of GPUs: numbers, UUIDs, MIG ids, none; and which entry a worker gets."""

from __future__ import annotations

import pytest

from dsv4_matrix.shard.gpus import GpuListError, pin, visible_gpus

TWO = """\
GPU 0: NVIDIA H200 (UUID: GPU-11111111-aaaa-bbbb-cccc-000000000000)
GPU 1: NVIDIA H200 (UUID: GPU-22222222-aaaa-bbbb-cccc-000000000000)
"""
DIVIDED = """\
GPU 0: NVIDIA H200 (UUID: GPU-11111111-aaaa-bbbb-cccc-000000000000)
  MIG 3g.71gb     Device  0: (UUID: MIG-aaaaaaaa-0000-5555-8888-000000000000)
  MIG 3g.71gb     Device  1: (UUID: MIG-bbbbbbbb-0000-5555-8888-000000000000)
GPU 1: NVIDIA H200 (UUID: GPU-22222222-aaaa-bbbb-cccc-000000000000)
"""


def never() -> str:
    raise AssertionError("the caller's list stands, whatever the machine has")


@pytest.mark.parametrize(
    ("value", "entries"),
    [
        ("1", ("1",)),
        ("2,3", ("2", "3")),
        (" 3 , 0 ", ("3", "0")),
        ("GPU-22222222-aaaa,GPU-11111111", ("GPU-22222222-aaaa", "GPU-11111111")),
        ("MIG-aaaaaaaa-0000", ("MIG-aaaaaaaa-0000",)),
        ("MIG-GPU-11111111/1/0,0", ("MIG-GPU-11111111/1/0", "0")),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0,-1,1", ("0",)),
        ("0,,1", ("0",)),
    ],
)
def test_entries_of_the_callers_list(value: str, entries: tuple[str, ...]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}, never) == entries


def test_an_entry_twice_is_refused() -> None:
    with pytest.raises(GpuListError, match="names 1 twice"):
        visible_gpus({"CUDA_VISIBLE_DEVICES": "1,0,1"}, never)


def test_without_a_list_every_gpu_by_uuid() -> None:
    assert [entry[:12] for entry in visible_gpus({}, lambda: TWO)] == ["GPU-11111111", "GPU-22222222"]


def test_a_divided_gpu_counts_by_its_instances() -> None:
    found = visible_gpus({}, lambda: DIVIDED)
    assert [entry[:12] for entry in found] == ["MIG-aaaaaaaa", "MIG-bbbbbbbb", "GPU-22222222"]


def test_without_a_driver_there_is_none() -> None:
    assert visible_gpus({}, lambda: "") == ()


def test_a_machine_without_nvidia_smi_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert visible_gpus({}) == ()


def test_a_failing_nvidia_smi_counts_as_none(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    tool = tmp_path / "nvidia-smi"  # type: ignore[operator]
    tool.write_text("#!/bin/sh\necho 'GPU 0: x (UUID: GPU-1)'\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert visible_gpus({}) == ()
    tool.write_text("#!/bin/sh\necho 'GPU 0: x (UUID: GPU-1)'\n")
    assert visible_gpus({}) == ("GPU-1",)


def test_worker_k_gets_entry_k() -> None:
    assert pin(2, ("3", "1", "0")) == ("3", "1")


def test_more_workers_than_gpus_only_by_request() -> None:
    with pytest.raises(GpuListError, match=r"3 workers for 2 GPUs \(2, 3\); give -n 2"):
        pin(3, ("2", "3"))
    assert pin(5, ("2", "3"), share=True) == ("2", "3", "2", "3", "2")


def test_no_gpu_at_all_is_refused() -> None:
    with pytest.raises(GpuListError, match="no GPU to pin 2 workers to"):
        pin(2, (), share=True)
