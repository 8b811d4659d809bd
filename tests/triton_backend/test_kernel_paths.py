"""What the backend tells about its kernels is what its choice does, and the table for explain says the same."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import dsv4_triton
import pytest
from dsv4_triton import DSV4TritonBackend, choice
from dsv4_triton.geometry import NUM_HEADS
from dsv4_triton.kernel_paths import kernels_of_target
from dsv4_triton.target import TARGETS

from dsv4_matrix.protocol import TellsKernels
from dsv4_matrix.report.kernels import DeclaredKernel, declared_kernels, header_text, kernel_paths, read_table

TABLE = read_table(Path(dsv4_triton.__file__).with_name("kernels.json"))


def kernel_of(target: str, call: str) -> str:
    """As the backend tells; calls of other head counts may have a line of their own."""
    told = {path["call"]: path["kernel"] for path in kernels_of_target(target)}
    return told.get(call, told.get(call.partition("/")[0], ""))


def declared(target: str, call: str, setting: str) -> list[DeclaredKernel]:
    return [e for e in TABLE if (e.call, e.setting) == (call, setting) and target in e.architectures]


def test_the_table_is_found_by_the_name_of_the_backend() -> None:
    assert declared_kernels("triton") == TABLE


def test_the_table_speaks_for_every_target_and_for_no_other() -> None:
    for call in ("attention", "sparse-prefill"):
        fallback = [entry for entry in TABLE if entry.call == call and not entry.when]
        assert [set(entry.architectures) for entry in fallback] == [set(TARGETS)], call
    assert {name for entry in TABLE for name in entry.architectures} == set(TARGETS)


@pytest.fixture
def known_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that every kernel is known to compile with, whatever is installed."""
    monkeypatch.setattr(choice, "TRITON", f"{choice.GLUON_RELEASES[0]}.0")


def attention_kernels(target: str) -> set[str]:
    return {kernel_of(target, f"attention/{heads}") for heads in NUM_HEADS}


@pytest.mark.usefixtures("known_triton")
@pytest.mark.parametrize("preferred", choice.KERNELS)
@pytest.mark.parametrize("target", TARGETS)
def test_the_choice_is_one_that_the_table_declares(
    monkeypatch: pytest.MonkeyPatch, target: str, preferred: str
) -> None:
    monkeypatch.setattr(choice, "PREFERRED", preferred)
    for heads in NUM_HEADS:
        for call in ("attention", "sparse-prefill"):
            kernels = {entry.kernel for entry in TABLE if entry.call == call and target in entry.architectures}
            assert kernel_of(target, f"{call}/{heads}") in kernels


@pytest.mark.usefixtures("known_triton")
@pytest.mark.parametrize("target", TARGETS)
def test_what_the_table_says_without_a_setting_is_the_default(target: str) -> None:
    if choice.SETTING in os.environ:
        pytest.skip(f"{choice.SETTING} is set, so the default cannot be seen")
    by_default = {entry.kernel for entry in declared(target, "attention", "")}
    assert attention_kernels(target) == by_default, (
        "kernels.json and choice.py disagree about the default: the entry of a kernel by default has an empty setting, "
        "that of another one names what asks for it"
    )


@pytest.mark.usefixtures("known_triton")
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_of_the_table_can_be_had(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    found = set()
    for preferred in choice.KERNELS:
        monkeypatch.setattr(choice, "PREFERRED", preferred)
        found |= attention_kernels(target)
    assert found == {entry.kernel for entry in TABLE if entry.call == "attention" and target in entry.architectures}


def test_the_default_is_told_for_this_device(device: str) -> None:
    assert isinstance(DSV4TritonBackend, TellsKernels)
    paths = kernel_paths(DSV4TritonBackend, device)
    assert {path.call.partition("/")[0] for path in paths} == {"attention", "sparse-prefill"}
    assert all(path.why for path in paths)


@pytest.mark.usefixtures("known_triton")
def test_the_other_choice_is_another_header(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {}
    for preferred in choice.KERNELS:
        monkeypatch.setattr(choice, "PREFERRED", preferred)
        told = kernels_of_target("sm90")
        texts[preferred] = header_text(kernel_paths(SimpleNamespace(kernel_paths=lambda _, told=told: told), "cuda"))
    assert texts["portable"] == "portable: attention, sparse-prefill"
    assert "hopper: attention/64, attention/128" in texts["hopper"]


def test_a_subclass_with_a_kernel_of_its_own_says_so(device: str) -> None:
    class Own(DSV4TritonBackend):
        def attend(self, *arguments):
            raise AssertionError("never called")

    class Later(Own):
        """Inherits the kernel, and is not the one to name."""

    for backend in (Own, Later):
        told = {path.call: path for path in kernel_paths(backend, device)}
        assert told["attention"].kernel.endswith(".Own.attend")
        assert told["attention"].why.endswith(".Own overrides attend")
        assert told["sparse-prefill"].kernel == "portable"
