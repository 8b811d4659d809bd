"""The number format against tables, exact bounds and torch's own cast, which the codec does not use."""

import math

import dsv4_reference
import pytest
import torch
from dsv4_reference.codec import decode_e4m3, encode_e4m3
from dsv4_reference.geometry import GROUP, GROUPS, NOPE

ALL_CODES = torch.arange(256, dtype=torch.uint8)


def row_with_group(values, group=0):
    """bf16 ``[1, 512]``: ``values`` at the start of one group, zeros elsewhere."""
    k = torch.zeros(1, 512, dtype=torch.bfloat16)
    k[0, group * GROUP : group * GROUP + len(values)] = torch.tensor(values).bfloat16()
    return k


def bf16_next(value, steps):
    """The bf16 value ``steps`` representable values above a positive one."""
    bits = torch.tensor([value]).bfloat16().view(torch.int16) + steps
    return float(bits.view(torch.bfloat16).float())


@pytest.mark.parametrize(
    ("code", "value"),
    [(0x00, 0.0), (0x80, -0.0), (0x01, 2.0**-9), (0x07, 7 * 2.0**-9), (0x08, 2.0**-6), (0x7E, 448.0), (0xFE, -448.0)],
)
def test_e4m3_bytes_mean_what_the_format_says(code, value):
    got = decode_e4m3(code)
    assert got == value
    assert math.copysign(1, got) == math.copysign(1, value)


def test_every_e4m3_byte_decodes_as_torchs():
    want = ALL_CODES.view(torch.float8_e4m3fn).double()
    got = torch.tensor([decode_e4m3(code) for code in range(256)], dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(got), torch.signbit(want) & ~got.isnan())
    assert got.isnan().nonzero()[:, 0].tolist() == [0x7F, 0xFF]


def test_every_finite_e4m3_value_encodes_to_its_own_byte():
    finite = [code for code in range(256) if code & 0x7F != 0x7F]
    values = torch.tensor([decode_e4m3(code) for code in finite], dtype=torch.float64)
    assert encode_e4m3(values).tolist() == finite


def test_ties_go_to_the_even_byte_and_their_neighbours_to_the_nearest():
    values = torch.tensor([decode_e4m3(code) for code in range(0x7F)], dtype=torch.float64)
    middle = (values[1:] + values[:-1]) / 2
    below = torch.arange(0x7E)
    assert torch.equal(encode_e4m3(middle), below + below % 2)
    assert torch.equal(encode_e4m3(middle * (1 - 2**-40)), below)
    assert torch.equal(encode_e4m3(middle * (1 + 2**-40)), below + 1)


@pytest.mark.parametrize(
    ("value", "code"), [(448.0, 0x7E), (460.0, 0x7E), (1e30, 0x7E), (math.inf, 0x7E), (-1e30, 0xFE), (math.nan, 0x7F)]
)
def test_encoding_saturates_and_keeps_nan(value, code):
    assert int(encode_e4m3(torch.tensor([value], dtype=torch.float64))) == code


@pytest.mark.parametrize("power", [-20, -9, 0, 1, 20, 100])
def test_scale_is_the_least_power_of_two_that_fits(power):
    edge = 448.0 * 2.0**power
    for steps, exponent in ((-1, power), (0, power), (1, power + 1)):
        codes, scales = dsv4_reference.quantise(row_with_group([bf16_next(edge, steps)]))
        expected = max(exponent, -22)  # amax is floored at 1e-4: ceil(log2(1e-4 / 448)) = -22
        assert scales[0, 0].item() == expected + 127, (power, steps)
        assert codes[0, 0].item() <= 0x7E


def test_scale_of_every_bf16_magnitude_is_the_least_that_fits():
    values = torch.arange(0, 0x7F80, dtype=torch.int16).view(torch.bfloat16)  # every finite positive bf16
    values = torch.nn.functional.pad(values, (0, -len(values) % GROUPS)).reshape(-1, GROUPS)
    k = torch.zeros(len(values), 512, dtype=torch.bfloat16)
    k[:, : GROUPS * GROUP : GROUP] = values
    _, scales = dsv4_reference.quantise(k)
    amax = values.double().clamp(min=1e-4)
    scale = torch.exp2(scales.double() - 127)
    assert bool((amax <= 448 * scale).all())
    assert bool((amax > 224 * scale).all())


@pytest.mark.parametrize("values", [[0.0], [1e-30], [1e-38, -1e-38]])
def test_tiny_groups_get_the_floor_scale_and_stay_finite(values):
    k = row_with_group(values)
    codes, scales = dsv4_reference.quantise(k)
    assert scales[0].tolist() == [105] * GROUPS
    assert codes[0, : len(values)].bitwise_and(0x7F).tolist() == [0] * len(values)
    assert bool(dsv4_reference.quantise_dequantise(k).isfinite().all())


def test_a_zero_group_among_normal_ones_is_zero():
    k = torch.full((1, 512), 1.5).bfloat16()
    k[0, 2 * GROUP : 3 * GROUP] = 0
    got = dsv4_reference.quantise_dequantise(k)
    assert bool((got[0, 2 * GROUP : 3 * GROUP] == 0).all())
    assert bool((got[0, : 2 * GROUP] == 1.5).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_group_that_is_not_finite_reads_as_nan_throughout_and_its_neighbours_do_not(bad):
    k = torch.ones(1, 512).bfloat16()
    k[0, 3 * GROUP + 5] = bad
    _, scales = dsv4_reference.quantise(k)
    got = dsv4_reference.quantise_dequantise(k)
    assert scales[0, 3].item() == 255
    assert bool(got[0, 3 * GROUP : 4 * GROUP].isnan().all())
    assert bool((got[0, : 3 * GROUP] == 1).all())
    assert bool((got[0, 4 * GROUP :] == 1).all())


def test_rope_is_exact_whatever_it_holds():
    k = torch.zeros(1, 512).bfloat16()
    k[0, NOPE:] = torch.tensor([math.nan, math.inf, -0.0, 1e-40, 3.3e38, *range(59)]).bfloat16()
    got = dsv4_reference.quantise_dequantise(k)[0, NOPE:]
    torch.testing.assert_close(got, k[0, NOPE:].double(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("byte", "scale"), [(0, 2.0**-127), (1, 2.0**-126), (120, 2.0**-7), (127, 1.0), (254, 2.0**127)]
)
def test_scale_bytes_are_powers_of_two(byte, scale):
    codes = torch.full((1, NOPE), 0x38, dtype=torch.uint8)  # 1.0
    scales = torch.full((1, GROUPS), byte, dtype=torch.uint8)
    assert bool((dsv4_reference.dequantise(codes, scales) == scale).all())


def test_scale_byte_255_is_nan_even_over_zero_codes():
    zeros = torch.zeros(1, NOPE, dtype=torch.uint8)
    scales = torch.full((1, GROUPS), 127, dtype=torch.uint8)
    scales[0, 6] = 255
    got = dsv4_reference.dequantise(zeros, scales)
    assert bool(got[0, 6 * GROUP :].isnan().all())
    assert bool((got[0, : 6 * GROUP] == 0).all())


def test_agrees_with_torchs_cast_on_many_rows():
    generator = torch.Generator().manual_seed(1)
    spread = torch.exp2(torch.randint(-20, 20, (400, 1), generator=generator).float())
    k = (torch.randn(400, 512, generator=generator) * spread).bfloat16()
    codes, scales = dsv4_reference.quantise(k)
    groups = k[:, :NOPE].double().reshape(-1, GROUPS, GROUP) / torch.exp2(scales.double() - 127)[..., None]
    want = groups.float().to(torch.float8_e4m3fn).view(torch.uint8).reshape(-1, NOPE)
    assert torch.equal(codes, want)


def test_dequantised_values_are_bf16_and_quantising_them_again_changes_nothing():
    k = torch.randn(50, 512, generator=torch.Generator().manual_seed(2)).bfloat16()
    once = dsv4_reference.quantise_dequantise(k)
    assert torch.equal(once.bfloat16().double(), once)
    assert torch.equal(dsv4_reference.quantise_dequantise(once.bfloat16()), once)
    bound = torch.maximum(k.double().abs() * 2**-4, torch.tensor(2.0**-10))
    assert bool(((once - k.double()).abs() <= bound).all())


def test_no_rows_and_wrong_widths():
    assert dsv4_reference.quantise_dequantise(torch.zeros(0, 512).bfloat16()).shape == (0, 512)
    with pytest.raises(ValueError, match=r"must be \[N, 512\], got shape \(3, 448\)"):
        dsv4_reference.quantise(torch.zeros(3, 448))
