"""Which kernel serves a call: by target, shapes and strides alone, each refusal with its reason."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from dsv4_triton import choice
from dsv4_triton.arguments import KeyList
from dsv4_triton.choice import choose
from dsv4_triton.pool import PackedPool

SCALE = 512**-0.5


def rows(batch: int = 2, heads: int = 64) -> torch.Tensor:
    return torch.zeros(batch, 1, heads, 512, dtype=torch.bfloat16)


def keys(pages: int = 3, page: int = 64, width: int = 8, batch: int = 2) -> KeyList:
    return KeyList(PackedPool(pages, page, "cpu").view(), torch.zeros(batch, 1, width, dtype=torch.int32), None)


@pytest.fixture(autouse=True)
def by_default(monkeypatch):
    monkeypatch.setattr(choice, "TRITON", "3.6.0")
    monkeypatch.setattr(choice, "PREFERRED", "hopper")


def test_the_portable_kernel_can_be_asked_for(monkeypatch):
    monkeypatch.setattr(choice, "PREFERRED", "portable")
    got = choose("sm90", rows(), keys(), None, SCALE, rows())
    assert got.kernel == "portable"
    assert "DSV4_TRITON_KERNEL=portable" in got.reason


@pytest.mark.parametrize(("value", "expected"), [(None, "hopper"), ("portable", "portable"), ("fast", "RuntimeError")])
def test_the_setting_is_read_once_and_checked(value, expected):
    environment = {name: text for name, text in os.environ.items() if name != choice.SETTING}
    environment |= {"TRITON_INTERPRET": "1"} | ({} if value is None else {choice.SETTING: value})
    code = "from dsv4_triton import choice; print(choice.PREFERRED)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert expected in (done.stdout if done.returncode == 0 else done.stderr)
    assert (done.returncode == 0) == (expected != "RuntimeError")


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("page", [1, 2, 64, 128, 256])
def test_the_models_calls_go_to_hopper_on_hopper(heads, page):
    q = rows(heads=heads)
    got = choose("sm90", q, keys(), keys(page=page), SCALE, q)
    assert got.kernel == "hopper", got.reason
    for target in ("sm80", "sm89", "sm100", "sm120", "gfx950", "interpreter"):
        other = choose(target, q, keys(), keys(page=page), SCALE, q)
        assert other.kernel == "portable"
        assert target in other.reason


@pytest.mark.parametrize("batch", [1, 2, 300])
@pytest.mark.parametrize("width", [1, 128, 9000])
def test_neither_batch_nor_width_has_a_part_in_it(batch, width):
    q = rows(batch)
    assert choose("sm90", q, keys(width=width, batch=batch), None, SCALE, q).kernel == "hopper"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"q": rows(heads=16)}, "64 query heads at a time, these are 16"),
        ({"scale": -1.0}, "positive softmax scale, got -1.0"),
        ({"scale": float("nan")}, "positive softmax scale, got nan"),
        ({"q": torch.zeros(2, 1, 64, 516, dtype=torch.bfloat16)[..., :512]}, "q does not keep its rows on 16 bytes"),
        ({"out": torch.zeros(2, 1, 64, 516, dtype=torch.bfloat16)[..., :512]}, "out does not keep its rows on 16"),
        ({"extra": keys(page=3)}, "the extra key list has pages of 3 entries"),
        ({"main": keys(width=0)}, "the key list has 3 pages and 0 indices a row"),
        ({"extra": KeyList(keys().keys[:0], keys().indices, None)}, "the extra key list has 0 pages"),
        ({"main": KeyList(torch.zeros(9, 512, dtype=torch.bfloat16), keys().indices, None)}, "the key list is bf16"),
        (
            {"main": KeyList(torch.zeros(3, 584, dtype=torch.uint8).view(3, 1, 1, 584), keys().indices, None)},
            "does not keep its pages on 16 bytes",
        ),
        (
            {"main": KeyList(keys().keys, torch.zeros(2, 1, 16, dtype=torch.int32)[..., ::2], None)},
            "has indices of stride 2",
        ),
    ],
)
def test_what_it_does_not_take_goes_to_the_portable_kernel_and_says_why(change, reason):
    call = {"q": rows(), "main": keys(), "extra": None, "scale": SCALE, "out": rows()} | change
    if "q" in change:
        call["out"] = rows(heads=change["q"].shape[2])
    got = choose("sm90", call["q"], call["main"], call["extra"], call["scale"], call["out"])
    assert got.kernel == "portable"
    assert reason in got.reason


def test_a_cache_beyond_the_reach_of_32_bits_of_16_bytes():
    far = torch.empty(300_000, 149_760, dtype=torch.uint8, device="meta")[:, : 256 * 584].unflatten(1, (256, 1, 584))
    got = choose("sm90", rows(), KeyList(far, keys().indices, None), None, SCALE, rows())
    assert got.kernel == "portable"
    assert "is larger than" in got.reason


@pytest.mark.parametrize(
    ("version", "kernel"), [("3.6.0", "hopper"), ("3.7.1", "hopper"), ("3.5.1", "portable"), ("4.0", "portable")]
)
def test_gluon_is_experimental(version, kernel, monkeypatch):
    monkeypatch.setattr(choice, "TRITON", version)
    got = choose("sm90", rows(), keys(), None, SCALE, rows())
    assert got.kernel == kernel
    assert (version in got.reason) == (kernel == "portable")


def test_a_caller_can_ask():
    """Interpreted or on another GPU the answer is the portable kernel; the reason names the target."""
    from dsv4_triton.flash_mla import kernel_choice

    device = "cuda" if torch.cuda.is_available() else "cpu"
    q = rows().to(device)
    some = keys()
    got = kernel_choice(q, some.keys.to(device), some.indices.to(device))
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    assert got.kernel == ("hopper" if hopper else "portable")
    assert got.reason


@pytest.mark.parametrize(("preferred", "capability", "loaded"), [
    ("hopper", (9, 0), True), ("hopper", (10, 0), False), ("portable", (9, 0), False),
])  # fmt: skip
def test_the_hopper_kernel_can_be_loaded_ahead_of_its_first_call(monkeypatch, preferred, capability, loaded):
    """Whoever watches its launches has to have it loaded before."""
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
    monkeypatch.setattr(choice, "PREFERRED", preferred)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.delitem(sys.modules, "dsv4_triton.hopper.launch", raising=False)
    choice.load_kernels()
    assert ("dsv4_triton.hopper.launch" in sys.modules) == loaded
