"""The context is created once, beside the collection, and is there before a case runs."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dsv4_matrix import waking
from dsv4_matrix.declaration.model import Case, Variant
from dsv4_matrix.guard import Guard
from dsv4_matrix.machine import Machine

CASE = Case("r0-eager-small", "case", variant=Variant("small", "decode", (64,)))
GPU = Machine("gpu", "cuda", "Test GPU", "2.13.0", "3.7.1")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device that wakes when it is let: ``go`` lets it, ``woken`` tells how often it did."""

    class Device:
        go = threading.Event()
        woken = 0

    def wake(device: str) -> None:
        Device.go.wait(30)
        Device.woken += 1

    monkeypatch.setattr(waking, "_thread", None)
    monkeypatch.setattr(waking, "_wake", wake)
    return Device


def test_a_case_begins_when_the_device_is_awake(slow: Any) -> None:
    waking.begin("cuda")
    assert slow.woken == 0, "the caller goes on meanwhile"
    threading.Timer(0.2, slow.go.set).start()
    with Guard(None, 60).watch(CASE, GPU):
        assert slow.woken == 1


def test_it_happens_once_a_process(slow: Any) -> None:
    slow.go.set()
    for _ in range(3):
        waking.begin("cuda")
    waking.finish()
    assert slow.woken == 1


def test_a_cpu_has_nothing_to_wake(slow: Any) -> None:
    waking.begin("cpu")
    waking.finish()
    assert slow.woken == 0


def test_an_error_is_left_to_the_first_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """No device here: torch raises in the thread, and nobody hears of it."""
    import torch

    def refuse(*shape: int, **options: object) -> None:
        raise RuntimeError("CUDA error: no device")

    monkeypatch.setattr(torch, "ones", refuse)
    waking._wake("cuda")
