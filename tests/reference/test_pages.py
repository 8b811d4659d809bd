"""The packed page, byte by byte."""

import dsv4_reference
import numpy as np
import pytest
import torch
from dsv4_reference.geometry import page_stride


def rows(count, seed=3):
    return torch.randn(count, 512, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(("entries", "stride"), [(128, 74880), (64, 37440), (2, 1728), (256, 149760)])
def test_strides_are_the_ones_that_production_uses(entries, stride):
    assert page_stride(entries) == stride


@pytest.mark.parametrize("entries", [1, 2, 3, 64, 128, 256])
def test_a_packed_page_reads_back_as_quantise_dequantise(entries):
    k = rows(entries)
    page = dsv4_reference.pack_page(k, entries)
    want = dsv4_reference.quantise_dequantise(k).numpy()
    np.testing.assert_array_equal(dsv4_reference.unpack_page(page, entries), want)


def test_bytes_lie_where_the_layout_says():
    k = torch.zeros(64, 512).bfloat16()
    k[5, 0] = 448.0  # code 0x7E, scale byte 127
    k[5, 64] = -896.0  # code 0xFE, scale byte 128
    k[5, 448] = 1.0  # bf16 0x3F80, little endian
    page = dsv4_reference.pack_page(k, 64)
    assert page[5 * 576] == 0x7E
    assert page[5 * 576 + 64] == 0xFE
    assert page[5 * 576 + 448 : 5 * 576 + 450].tolist() == [0x80, 0x3F]
    assert page[64 * 576 + 5 * 8 : 64 * 576 + 5 * 8 + 8].tolist() == [127, 128, 105, 105, 105, 105, 105, 0]
    assert page[64 * 584 :].tolist() == [0] * 64


def test_bytes_that_no_row_owns_are_kept():
    poison = np.full(page_stride(4), 0xA5, np.uint8)
    page = dsv4_reference.pack_page(rows(2), 4, onto=poison)
    owned = np.zeros(page_stride(4), bool)
    owned[: 2 * 576] = True
    for token in range(2):
        owned[4 * 576 + token * 8 : 4 * 576 + token * 8 + 7] = True
    assert (page[~owned] == 0xA5).all()
    assert (poison == 0xA5).all()


def test_poison_reads_as_nan_in_all_three_parts():
    page = np.full(page_stride(2), 0xFF, np.uint8)
    assert np.isnan(dsv4_reference.unpack_page(page, 2)).all()


def test_wrong_inputs_are_named():
    with pytest.raises(ValueError, match=r"bf16 \[n <= 2, 512\], got torch.bfloat16 \(3, 512\)"):
        dsv4_reference.pack_page(rows(3), 2)
    with pytest.raises(ValueError, match=r"uint8 \[1728\], got uint8 \(1168,\)"):
        dsv4_reference.unpack_page(np.zeros(1168, np.uint8), 2)
