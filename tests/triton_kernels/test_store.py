"""Pack-and-store and unpack, byte for byte: what is written, what is not, and every byte read right."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from dsv4_reference.codec import dequantise
from dsv4_triton.pool import PackedPool
from dsv4_triton.store import pack_and_store, unpack


def poisoned(pages: int, page: int, device: str) -> PackedPool:
    pool = PackedPool(pages, page, device)
    pool.buffer.fill_(0xFF)
    return pool


def rows_with_edges(generator: torch.Generator) -> torch.Tensor:
    """bf16 ``[48, 512]``: many magnitudes, and in the first rows one group each of faults.md G's edges."""
    rows = torch.randn(48, 512, generator=generator)
    rows *= torch.exp2(torch.randint(-40, 40, (48, 1), generator=generator).float())
    rows = rows.bfloat16()
    amax = [0.0, 1e-30, 1e-4, 9.9e-5, 448.0, 450.0, 449.0, 896.0, 448.0 * 2**20, 2.0**127, 3.38e38]
    for row, value in enumerate(amax):
        rows[row, 64:128] = torch.linspace(-1, 1, 64).bfloat16() * 0.5 * torch.tensor(value).bfloat16()
        rows[row, 70] = -value
    rows[11, 0:64] = 0.0
    rows[12, 130], rows[13, 200], rows[14, 447] = math.nan, math.inf, -math.inf
    rows[15, 448:] = math.nan  # rope is copied, whatever it is
    rows[16, 100] = torch.tensor(448.0).bfloat16() + 2  # one ulp above: the exponent must go up
    return rows


@pytest.mark.parametrize("page", [1, 2, 64, 100, 128, 256])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bytes_equal_the_reference_packing(page, dtype, device, generator, pack):
    rows = rows_with_edges(generator)
    pages = 600 // page + 1
    slots = torch.randperm(pages * page - 1, generator=generator)[:48] + 1
    pool = poisoned(pages, page, device)
    pack_and_store(rows.to(device), slots.to(device, dtype), pool)
    want = pack(rows, slots, pages, page)
    assert np.array_equal(pool.buffer.cpu().numpy(), want)


@pytest.mark.parametrize("exponent", [0, -9, 30])
@pytest.mark.parametrize("sparse", [False, True])
def test_every_bf16_value_under_one_scale(exponent, sparse, device, pack):
    """All 65,536 patterns, 63 a group beside the 448 that sets its scale: ties, carries, subnormals, both zeros.

    Larger values set a scale of their own, and with infinities and NaN of either sign a group is 0x7F throughout.
    """
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    patterns = torch.cat([patterns, patterns.new_zeros(-len(patterns) % (63 * 7))]).view(-1, 7, 63)
    largest = torch.tensor([448.0 * 2.0**exponent]).bfloat16().view(torch.int16).expand(len(patterns), 7, 1)
    rope = patterns.flatten(1)[:, :64]
    rows = torch.cat([torch.cat([patterns, largest], 2).flatten(1), rope], 1).view(torch.bfloat16)
    slots = torch.arange(1, len(rows) + 1)
    pool = poisoned(2, 128, device)
    pack_and_store(rows.to(device), slots.to(device), pool, sparse=sparse)
    assert np.array_equal(pool.buffer.cpu().numpy(), pack(rows, slots, 2, 128))


@pytest.mark.parametrize("sparse", [False, True])
def test_locations_beyond_any_pool_write_nothing(sparse, device, generator, pack):
    """Where a page is found by multiplication, 2**31 is where it would stop being exact."""
    rows = torch.randn(5, 512, generator=generator).bfloat16()
    locations = torch.tensor([2**31, 2**33 + 8, 2**62, 2**31 - 1, 8])
    pool = poisoned(2, 64, device)
    pack_and_store(rows.to(device), locations.to(device), pool, ratio=4, sparse=sparse)
    assert np.array_equal(pool.buffer.cpu().numpy(), pack(rows[4:], torch.tensor([2]), 2, 64))


@pytest.mark.parametrize("ratio", [1, 3, 4, 128])
def test_any_ratio_divides_exactly(ratio, device, generator, pack):
    slots = torch.randperm(127, generator=generator)[:40] + 1
    rows = torch.randn(40, 512, generator=generator).bfloat16()
    locations = slots * ratio + torch.randint(0, ratio, (40,), generator=generator)
    pool = poisoned(2, 64, device)
    pack_and_store(rows.to(device), locations.to(device), pool, ratio=ratio)
    assert np.array_equal(pool.buffer.cpu().numpy(), pack(rows, slots, 2, 64))


def test_a_wrong_byte_would_be_seen(device, generator, pack):
    rows = rows_with_edges(generator)
    slots = torch.arange(1, 49)
    pool = poisoned(2, 64, device)
    pack_and_store(rows.to(device), slots.to(device), pool)
    assert not np.array_equal(pool.buffer.cpu().numpy(), pack(rows, slots.flip(0), 2, 64))


def test_locations_that_own_nothing_write_nothing(device, generator, pack):
    """faults.md F7: pad rows hold NaN; -1, 0 and slots beyond the pool are skipped, first and last slot stay."""
    rows = torch.randn(8, 512, generator=generator).bfloat16()
    slots = torch.tensor([10, -1, 0, 11, -(2**31), 128, 2**31 - 1, 129])
    rows[[1, 2, 4, 5, 6, 7]] = math.nan
    pool = poisoned(2, 64, device)
    pack_and_store(rows.to(device), slots.to(device), pool)
    assert np.array_equal(pool.buffer.cpu().numpy(), pack(rows[[0, 3]], slots[[0, 3]], 2, 64))


@pytest.mark.parametrize("row_stride", [512, 576, 640, 513])
def test_any_row_stride(row_stride, device, generator, pack):
    rows = torch.randn(5, row_stride, generator=generator).bfloat16()[:, :512]
    pool = poisoned(3, 2, device)
    slots = torch.tensor([5, 1, 4, 2, 3])
    pack_and_store(rows.to(device) if row_stride == 512 else strided(rows, device), slots.to(device), pool)
    assert np.array_equal(pool.buffer.cpu().numpy(), pack(rows.contiguous(), slots, 3, 2))


def strided(rows: torch.Tensor, device: str) -> torch.Tensor:
    room = torch.full((rows.shape[0], rows.stride(0)), math.nan, dtype=rows.dtype, device=device)
    room[:, :512] = rows.to(device)
    return room[:, :512]


def test_translation_through_a_slot_map(device, generator, pack):
    rows = torch.randn(7, 512, generator=generator).bfloat16()
    mapping = torch.full((601,), -1, dtype=torch.int64)
    mapping[[300, 301, 599, 5, 0]] = torch.tensor([17, 90, 1, 0, 40])
    locations = torch.tensor([300, 599, 301, 5, 0, -3, 601])  # mapped to 0; the dummy; negative; beyond the map
    pool = poisoned(2, 64, device)
    pack_and_store(rows.to(device), locations.to(device), pool, mapping=mapping.to(device))
    assert np.array_equal(pool.buffer.cpu().numpy(), pack(rows[:3], torch.tensor([17, 1, 90]), 2, 64))


def test_compressed_slots_from_full_locations(device, generator, pack):
    rows = torch.randn(3, 512, generator=generator).bfloat16()
    pool = poisoned(4, 2, device)
    pack_and_store(rows.to(device), torch.tensor([256 + 127, -1, 512 + 255], device=device), pool, ratio=128)
    assert np.array_equal(pool.buffer.cpu().numpy(), pack(rows[[0, 2]], torch.tensor([2, 5]), 4, 2))


def test_every_code_under_every_scale_edge(device):
    """faults.md G1, G2, G4: 256 codes (two zeros, subnormals, NaN) times scale bytes from 0 to 255."""
    scales = [0, 1, 2, 104, 120, 126, 127, 128, 134, 135, 200, 253, 254, 255]
    codes = np.arange(256, dtype=np.uint8)
    rows = len(scales)
    pool = PackedPool(1, rows, device)
    page = pool.buffer[0].cpu().numpy()
    for row, scale in enumerate(scales):
        page[row * 576 : row * 576 + 256] = codes
        page[rows * 576 + row * 8 : rows * 576 + row * 8 + 7] = scale
    pool.buffer[0] = torch.from_numpy(page).to(device)
    out = torch.empty(rows, 512, dtype=torch.bfloat16, device=device)
    unpack(pool, torch.arange(rows, device=device), out)
    all_codes = torch.zeros(rows, 448, dtype=torch.uint8)
    all_codes[:, :256] = torch.from_numpy(codes)
    exact = dequantise(all_codes, torch.tensor(scales, dtype=torch.uint8)[:, None].expand(-1, 7).contiguous())
    # exact values have four significant bits; fp32 holds them all, so there is one rounding, or an overflow to inf
    got, want = out[:, :448].cpu(), exact.float().bfloat16()
    want[:-1, 0x80] = 0.0  # -0 reads as +0; the last scale byte makes NaN of it
    assert torch.equal(got.isnan(), want.isnan())
    bits, wanted = (x.view(torch.int16)[~want.isnan()] for x in (got, want))
    assert torch.equal(bits, wanted)
    assert out[scales.index(120), 0x38].item() == 2.0**-7
    assert bool(out[scales.index(255)][:448].isnan().all())
    assert out[scales.index(0), 0x38].item() == 2.0**-127


def test_unpack_into_a_slice_of_a_workspace(device, generator, make_keys):
    rows = torch.randn(20, 512, generator=generator).bfloat16()
    slots = torch.randperm(30, generator=generator)[:20]
    keys = make_keys(rows, slots, 3, 10)
    pool = PackedPool(3, 10, device)
    pool.buffer[:, : 10 * 584] = keys.view.flatten(1)
    room = torch.full((24, 600), 7.0, dtype=torch.bfloat16, device=device)
    wanted = torch.cat([slots, torch.tensor([-1, 30, 2**31 - 1])]).int().to(device)
    unpack(pool, wanted, room[:23, :512])
    assert torch.equal(room[:20, :512].double(), keys.values[slots.to(device)])
    assert bool((room[20:23, :512] == 0).all())
    assert bool((room[:, 512:] == 7).all())
    assert bool((room[23] == 7).all())


def test_a_slot_beyond_two_gibibytes(device, generator):
    pool = PackedPool(1, 256, device)
    pool.buffer = torch.empty(2**31 // 149_760 + 8, 149_760, dtype=torch.uint8, device=device)  # untouched, so free
    rows = torch.randn(2, 512, generator=generator).bfloat16().to(device)
    slots = torch.tensor([pool.capacity - 1, pool.capacity - 300], device=device)
    assert slots.min() // 256 * 149_760 > 2**31
    pack_and_store(rows, slots, pool)
    out = torch.empty(2, 512, dtype=torch.bfloat16, device=device)
    unpack(pool, slots, out)
    assert bool(((out - rows).abs().float() <= 2.0**-4 * rows.abs().amax(1, keepdim=True)).all())
    assert pool.buffer[-1, 255 * 576 : 256 * 576].any()


def test_nothing_to_do(device):
    pool = poisoned(1, 2, device)
    nothing = torch.empty(0, 512, dtype=torch.bfloat16, device=device)
    pack_and_store(nothing, torch.empty(0, dtype=torch.int32, device=device), pool)
    unpack(pool, torch.empty(0, dtype=torch.int64, device=device), nothing)
    assert bool((pool.buffer == 0xFF).all())


@pytest.mark.parametrize(
    ("error", "change", "words"),
    [
        (AssertionError, {"k": torch.zeros(2, 512)}, "k must be bf16"),
        (AssertionError, {"k": torch.zeros(2, 500).bfloat16()}, "k must be bf16"),
        (AssertionError, {"k": torch.zeros(512, 2).bfloat16().t()}, "contiguous last dimension"),
        (AssertionError, {"slots": torch.zeros(3, dtype=torch.int64)}, "slots must be int32 or int64"),
        (AssertionError, {"slots": torch.zeros(2)}, "slots must be int32 or int64"),
        (ValueError, {"mapping": torch.zeros(2)}, "mapping must be"),
        (ValueError, {"mapping": torch.zeros(2, dtype=torch.int64), "ratio": 4}, "without a ratio"),
        (ValueError, {"ratio": 0}, "ratio must be at least 1"),
    ],
)
def test_wrong_arguments_are_named_and_nothing_is_written(error, change, words, device):
    pool = poisoned(1, 2, device)
    arguments = {"k": torch.zeros(2, 512).bfloat16(), "slots": torch.ones(2, dtype=torch.int64)} | change
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with pytest.raises(error, match=words):
        pack_and_store(moved.pop("k"), moved.pop("slots"), pool, **moved)
    assert bool((pool.buffer == 0xFF).all())
