"""What the CUDA driver tells, read by its own calls: a stand-in answers as a driver does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dsv4_matrix.shard import driver


def stand_in(names: tuple[str, ...], *, version: int = 13000, fails: str = "") -> Any:
    """A loaded library: every call returns its status, 0 for good, and writes through its first argument."""

    def call(name: str, write: Any) -> Any:
        def called(*arguments: Any) -> int:
            if name == fails:
                return 100
            write(*arguments)
            return 0

        return called

    def set_to(value: int) -> Any:
        return lambda where, *_: setattr(where._obj, "value", value)

    def name_of(buffer: Any, size: int, device: Any) -> None:
        assert len(buffer) == size
        buffer.value = names[device.value].encode()

    calls = {
        "cuInit": lambda flags: None,
        "cuDriverGetVersion": set_to(version),
        "cuDeviceGetCount": set_to(len(names)),
        "cuDeviceGet": lambda where, ordinal: setattr(where._obj, "value", ordinal),
        "cuDeviceGetName": name_of,
    }
    return SimpleNamespace(**{name: call(name, write) for name, write in calls.items()})


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(library: Any) -> None:
        monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: library)

    return install


def test_names_in_the_drivers_order(answering: Any) -> None:
    answering(stand_in(("NVIDIA H200", "NVIDIA B200")))
    assert driver.device_names("13.0") == ("NVIDIA H200", "NVIDIA B200")


@pytest.mark.parametrize("call", ["cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName"])
def test_a_driver_that_fails_shows_nothing(answering: Any, call: str) -> None:
    answering(stand_in(("NVIDIA H200",), fails=call))
    assert driver.device_names("13.0") == ()


@pytest.mark.parametrize(("version", "shown"), [(12090, 0), (13000, 1), (13010, 1), (14000, 1)])
def test_an_older_driver_does_not_serve_torch(answering: Any, version: int, shown: int) -> None:
    answering(stand_in(("NVIDIA H200",), version=version))
    assert len(driver.device_names("13.1")) == shown


def test_without_a_driver_there_is_none() -> None:
    assert driver.device_names("13.0", "libno-such-driver.so.1") == ()
    with pytest.raises(OSError, match="libno-such-driver"):
        driver.served_cuda("libno-such-driver.so.1")


def test_the_cuda_that_it_serves(answering: Any) -> None:
    answering(stand_in((), version=13010))
    assert driver.served_cuda() == 13010


def test_a_driver_that_does_not_tell_its_cuda(answering: Any) -> None:
    answering(stand_in((), fails="cuDriverGetVersion"))
    with pytest.raises(RuntimeError, match="cuDriverGetVersion: CUDA error 100"):
        driver.served_cuda()
