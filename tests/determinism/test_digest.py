"""Digests: fixed answers, everything that must change them, and how a difference is told."""

from __future__ import annotations

import struct
import subprocess
import sys

import pytest
import torch

from dsv4_matrix.judge.bits import (
    as_bits,
    bit_equal,
    first_difference,
    row_digests,
    tensor_digest,
    ulp_distance,
)
from dsv4_matrix.report.digest import DigestError, digest
from dsv4_matrix.report.digest import row_digests as plain_row_digests

WORDS = (0x00000000, 0x80000000, 0x7FC00000, 0x3F800000)


def packed(*words):
    return struct.pack(f"<{len(words)}I", *words)


def floats(*words):
    return torch.tensor([word - (word >> 31 << 32) for word in words], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("dtype", "shape", "data", "expected"),
    [
        ("float32", (2, 2), packed(*WORDS), "afaa775ea479b7b07d5be6ffd6b42604f3706fc057118277656a3c9e0ed953aa"),
        (
            "float32",
            (2, 2),
            packed(0, 0, 0x7FC00000, 0x3F800000),
            "304ba3128cd06906a449c4cf5b24bba8e341215fff022eaa3fc0b53f32844f9c",
        ),
        (
            "float32",
            (2, 2),
            packed(0, 0x80000000, 0x7FC00001, 0x3F800000),
            "ecc61c85163f72e5673f0c5e22d35db3a162a14edb66501ff0f8e462fd7bee71",
        ),
        ("float32", (4,), packed(*WORDS), "3f3ea1f2610b3a552a5b325f3b923284947f2b93884401bf4cc8a55c72e04fe9"),
        ("int32", (2, 2), packed(*WORDS), "757ca3ada2956c5bbe5b318009f66e0c7ec04922560165d72bd4d06dacd788c8"),
        ("float32", (0, 2), b"", "31b90b26ac1cc49abd992d95197fce62558f47c2df159935c7b9e338f22538b1"),
    ],
    ids=["signed-zero-and-nan", "positive-zero", "nan-payload", "another-shape", "another-type", "empty"],
)
def test_fixed_answers(dtype, shape, data, expected):
    assert digest("out", dtype, shape, data) == expected
    tensor = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)) if data else torch.empty(0)
    assert tensor_digest("out", tensor.reshape(shape)) == expected


def test_name_enters():
    assert digest("out", "int32", (1,), packed(1)) != digest("lse", "int32", (1,), packed(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64, torch.bool])
def test_types_and_strides(dtype):
    tensor = (torch.arange(24) % 2 if dtype == torch.bool else torch.arange(24)).to(dtype).reshape(4, 6)
    assert tensor_digest("x", tensor[:, ::2]) == tensor_digest("x", tensor[:, ::2].clone())
    assert tensor_digest("x", tensor.t()) != tensor_digest("x", tensor.reshape(6, 4))
    assert tensor_digest("x", tensor[0, 0]) == tensor_digest("x", tensor[0, 0].clone())


def test_mask_leaves_undefined_elements_out_and_counts_itself():
    tensor, mask = torch.arange(6.0).reshape(3, 2), torch.tensor([True, False, True])
    poisoned = tensor.clone()
    poisoned[1] = torch.nan
    assert tensor_digest("x", tensor, mask=mask) == tensor_digest("x", poisoned, mask=mask)
    assert tensor_digest("x", tensor) != tensor_digest("x", poisoned)
    assert tensor_digest("x", tensor, mask=mask) != tensor_digest("x", tensor, mask=torch.ones(3, dtype=torch.bool))
    assert tensor_digest("x", tensor, mask=torch.ones(3, 2, dtype=torch.bool)) != tensor_digest("x", tensor)
    changed = tensor.clone()
    changed[2, 1] = 7
    assert tensor_digest("x", tensor, mask=mask) != tensor_digest("x", changed, mask=mask)
    other = torch.tensor([False, True, True])
    same_rows = torch.ones(3, 2)
    assert tensor_digest("x", same_rows, mask=mask) != tensor_digest("x", same_rows, mask=other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_canonical_nan_is_an_opt_in(dtype):
    plain = torch.full((3,), torch.nan, dtype=dtype)
    bits = as_bits(plain).clone()
    bits[1] += 1
    payload = bits.view(dtype)
    assert payload.isnan().all()
    assert tensor_digest("x", plain) != tensor_digest("x", payload)
    assert tensor_digest("x", plain, canonical_nan=True) == tensor_digest("x", payload, canonical_nan=True)
    assert row_digests("x", plain, "abc", canonical_nan=True) == row_digests("x", payload, "abc", canonical_nan=True)
    assert tensor_digest("x", torch.zeros(3, dtype=dtype), canonical_nan=True) != tensor_digest(
        "x", -torch.zeros(3, dtype=dtype), canonical_nan=True
    )


def test_rows_by_key_follow_the_row():
    tensor = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
    keys = ["a", "b", "needle", "c"]
    order = [2, 0, 3, 1]
    moved = row_digests("out", tensor[order], [keys[at] for at in order])
    assert moved == row_digests("out", tensor, keys)
    swapped = row_digests("out", tensor, ["b", "a", "needle", "c"])
    assert {key for key in keys if swapped[key] != moved[key]} == {"a", "b"}
    twice = row_digests("out", tensor[[2, 2]], ["needle", "again"])
    assert twice["needle"] == twice["again"] == moved["needle"]


def test_bad_input_is_refused():
    for call, reason in (
        (lambda: digest("out", "float32", (2,), b"1234"), "8 bytes, got 4"),
        (lambda: digest("out\nint32", "float32", (1,), b"1234"), "printable"),
        (lambda: digest("", "float32", (1,), b"1234"), "printable"),
        (lambda: digest("out", "f32", (1,), b"1234"), "unknown type 'f32'"),
        (lambda: digest("out", "float32", (1,), b"1234", b"\2"), "mask"),
        (lambda: digest("out", "float32", (1,), b"1234", b"\1\1"), "mask"),
        (lambda: plain_row_digests("out", "uint8", (2, 1), b"12", ["a"]), "one a row"),
        (lambda: plain_row_digests("out", "uint8", (2, 1), b"12", ["a", "a"]), "twice: a"),
        (lambda: plain_row_digests("out", "uint8", (2, 1), b"123", ["a", "b"]), "2 bytes, got 3"),
        (lambda: plain_row_digests("out", "uint8", (), b"1", []), "one a row"),
    ):
        with pytest.raises(DigestError, match=reason):
            call()


def test_bit_equality_is_not_value_equality():
    zero, nan = torch.zeros(1), floats(0x7FC00000)
    assert torch.equal(zero, -zero)
    assert not bit_equal(zero, -zero)
    assert not torch.equal(nan, nan)
    assert bit_equal(nan, nan.clone())
    assert not bit_equal(nan, floats(0x7FC00001))
    assert not bit_equal(torch.zeros(4), torch.zeros(2, 2))
    assert not bit_equal(torch.zeros(1), torch.zeros(1, dtype=torch.int32))
    wide = torch.tensor([1.0], dtype=torch.float64)
    assert not bit_equal(wide, wide + 2**-40)
    assert bit_equal(wide.float(), (wide + 2**-40).float())


def test_first_difference():
    left = torch.ones(3, 2, 2)
    assert first_difference(left, left.clone()) is None
    right = left.clone()
    right[1, 1, 0] = 1 + 2**-23
    right[2, 0, 1] = -1
    told = first_difference(left, right, keys=["x", "needle", "y"])
    assert (told.row, told.column, told.key, told.ulps) == (1, 2, "needle", 1)
    assert (told.left, told.right) == ("0x3F800000", "0x3F800001")
    assert (told.elements, told.rows, told.of_elements, told.of_rows) == (2, 2, 12, 3)
    for part in ("needle", "column 2", "0x3F800000", "0x3F800001", "1 ulp", "2 of 12 elements"):
        assert part in str(told)
    assert first_difference(torch.zeros(1), -torch.zeros(1)).ulps == 0
    assert first_difference(torch.zeros(1), floats(0x7FC00000)).ulps is None
    ints = first_difference(torch.tensor([-1]), torch.tensor([2]))
    assert (ints.left, ints.ulps) == ("0x" + "F" * 16, None)
    assert first_difference(torch.tensor(1.0), torch.tensor(2.0)).ulps == 2**23
    assert first_difference(torch.empty(0, 3), torch.empty(0, 3)) is None
    with pytest.raises(ValueError, match="one type and shape"):
        first_difference(torch.zeros(4), torch.zeros(2, 2))


def test_one_flipped_bit_of_a_bfloat16_is_found():
    left = torch.zeros(70, 9, dtype=torch.bfloat16)
    right = left.clone()
    right.view(torch.int16)[66, 4] = 1
    told = first_difference(left, right)
    assert (told.row, told.column, told.left, told.right, told.ulps) == (66, 4, "0x0000", "0x0001", 1)


def test_ulp_distance_crosses_zero():
    assert ulp_distance(0x00000001, 0x80000001, 32) == 2
    assert ulp_distance(0x7F800000, 0x7F7FFFFF, 32) == 1


def test_digests_need_no_torch():
    program = (
        "import sys, dsv4_matrix.report.digest as d; d.digest('x', 'int8', (1,), b'1');"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
