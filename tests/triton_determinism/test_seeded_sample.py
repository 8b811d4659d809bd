# ruff: noqa: N803 - constexpr names are upper case
"""The Gumbel kernel draws the reference's tokens, never a masked column, and rows stay apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from dsv4_reference import seeded_sample as reference
from dsv4_triton import seeded_sample as module
from dsv4_triton.seeded_sample import seeded_sample, seeded_sample_sorted


def ints(values, device):
    return torch.tensor(np.asarray(values, dtype=np.int64), device=device)


@triton.jit
def noise_kernel(hashes, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, module.gumbel(tl.load(hashes + at)))


def test_noise(device):
    hashes = np.concatenate([[0, 1, 2], np.arange(0xFFFFFFFF - 252, 0x100000000)]).astype(np.uint32)
    out = torch.empty(256, dtype=torch.float64, device=device)
    noise_kernel[(1,)](torch.from_numpy(hashes).to(device), out, BLOCK=256)
    np.testing.assert_allclose(out.cpu().numpy(), reference.gumbel(hashes), rtol=4e-16)
    assert round(out[0].item(), 2) == -709.78
    assert out[-1].item() == pytest.approx(22.18070977791825, rel=1e-15)
    assert out[-1] > out[-2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [5, 1024, 2500])
def test_tokens_equal_the_reference(generator, device, dtype, vocabulary):
    logits = torch.from_numpy(3 * generator.normal(size=(12, vocabulary))).to(dtype)
    logits[:, 1::4] = -torch.inf
    seeds, positions = generator.integers(-(2**63), 2**63, 12), generator.integers(0, 2**40, 12)
    drawn = seeded_sample(logits.to(device), ints(seeds, device), ints(positions, device))
    assert drawn.tolist() == reference.seeded_sample(logits.float().numpy(), seeds, positions).tolist()
    ranked = seeded_sample_sorted(logits.to(device), ints(seeds, device), ints(positions, device))
    assert ranked.tolist() == reference.seeded_sample_sorted(logits.float().numpy(), seeds, positions).tolist()


def test_masked_column_with_the_top_hash_is_not_drawn(device):
    logits = torch.zeros(1, 1300, device=device)
    logits[0, 1208] = -torch.inf
    seed, position = ints([7847], device), ints([12345], device)
    assert seeded_sample(logits, seed, position).tolist() != [1208]
    logits[0, 1208] = 0  # and it wins when it is allowed: its coin is the largest there is
    assert seeded_sample(logits, seed, position).tolist() == [1208]


def test_rows_and_strides(generator, device):
    wide = torch.from_numpy(generator.normal(size=(4, 90))).float().to(device)
    seeds, positions = ints([5, 5, -6, 7], device), ints([1, 1, 2, 3], device)
    together = seeded_sample(wide[:, :70], seeds, positions)
    for row in range(4):
        alone = seeded_sample(wide[row : row + 1, :70].contiguous(), seeds[row : row + 1], positions[row : row + 1])
        assert alone.tolist() == together[row : row + 1].tolist()


def test_out_buffer_and_refusals(device):
    logits, two = torch.zeros(2, 8, device=device), ints([1, 2], device)
    out = torch.full((2,), -1, dtype=torch.int32, device=device)
    assert seeded_sample(logits, two, two, out=out) is out
    assert (out >= 0).all()
    with pytest.raises(ValueError, match="unpad"):
        seeded_sample(torch.zeros(3, 8, device=device), two, two)
    with pytest.raises(ValueError, match="unpad"):
        seeded_sample(logits, two, ints([1, 2, 3], device))
    with pytest.raises(ValueError, match="out is not"):
        seeded_sample(logits, two, two, out=out.long())
    assert seeded_sample(logits[:0], two[:0], two[:0]).shape == (0,)


def test_row_without_finite_value_gives_zero(device):
    logits = torch.tensor([[-torch.inf] * 4, [torch.nan, 0, -torch.inf, -torch.inf]], device=device)
    assert seeded_sample(logits, ints([1, 2], device), ints([1, 2], device)).tolist() == [0, 1]
