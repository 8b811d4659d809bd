"""Keys whose packed bytes are misread are told from each other, from other keys in another size, and from good ones."""

import dsv4_reference
import numpy as np
import pytest
import torch

from dsv4_matrix.judge.sight import sight_of
from dsv4_matrix.judge.wrong_bytes import scale_exponents

NEXT = "each group of 64 under the scale of the next group"
PREVIOUS = "each group of 64 under the scale of the previous group"
FP16 = "elements 448 to 511 of all keys read as fp16 instead of bf16"
E5M2 = "elements 0 to 447 of all keys read as e5m2 instead of e4m3"
UNWRITTEN = (
    "NaN in every row, as from a slot that holds no live key or a scale byte that nothing wrote, of e4m3 codes read as "
    "e5m2 or of arithmetic that all share"
)


@pytest.fixture
def step(kit):
    return kit.step("misread", 4, (9, 130, 400, 2300), heads=16, sink="per-head")


def answer_over_page(step, misread):
    """A kernel's answer, its keys out of one packed page as ``misread(page, tokens)`` sees it."""
    sight = sight_of(step, dsv4_reference)
    count = len(sight.bank)
    page = dsv4_reference.pack_page(sight.bank, count, onto=np.full(page_bytes(count), 0xFF, np.uint8))
    keys = torch.from_numpy(dsv4_reference.unpack_page(misread(page, count), count))
    out, lse = dsv4_reference.attend(step.q, keys, sight.index, step.sink, step.softmax_scale)
    return out.bfloat16(), lse.float()


def page_bytes(tokens):
    return -(-tokens * 584 // 576) * 576


def scales_of(page, tokens):
    return page[tokens * 576 : tokens * 584].reshape(tokens, 8)


def shifted(shift, edge):
    """The page as a kernel sees it that takes scale byte g + shift for group g."""

    def misread(page, tokens):
        page, scales = page.copy(), scales_of(page, tokens).copy()
        group = np.arange(7) + shift
        taken = {"wraps": group % 7, "stays": group.clip(0, 6), "reads on": group % 8}[edge]
        scales_of(page, tokens)[:, :7] = scales[:, taken]
        return page

    return misread


def rope_as_fp16(page, tokens):
    """The page whose rope part holds, in bf16, what its bytes are in fp16: exact, which has three bits too many."""
    page = page.copy()
    rope = page[: tokens * 576].reshape(tokens, 576)[:, 448:]
    values = torch.from_numpy(np.ascontiguousarray(rope).view("<f2").astype(np.float32)).bfloat16()
    rope[:] = values.view(torch.int16).numpy().astype("<i2").view(np.uint8)
    return page


def agrees(kit, step, answer):
    verdict = kit.one(step, answer)
    assert verdict.outcome == "failed"
    return next(line for line in verdict.message.splitlines() if line.startswith("  agrees"))


def test_a_page_read_as_it_should_be_passes(kit, step):
    assert kit.one(step, answer_over_page(step, lambda page, tokens: page)).outcome == "passed"


@pytest.mark.parametrize("edge", ["wraps", "stays"])
@pytest.mark.parametrize(("shift", "named"), [(1, NEXT), (-1, PREVIOUS)])
def test_scales_of_a_neighbouring_group_are_named(kit, step, shift, named, edge):
    told = agrees(kit, step, answer_over_page(step, shifted(shift, edge)))
    assert told == f"  agrees   with: {named} (rows 0, 1, 2, 3)"


@pytest.mark.parametrize("shift", [1, -1])
def test_scales_that_reach_the_byte_that_nothing_writes_are_told(kit, step, shift):
    told = agrees(kit, step, answer_over_page(step, shifted(shift, "reads on")))
    assert told == f"  agrees   with: {UNWRITTEN} (rows 0, 1, 2, 3)"


def test_a_rope_part_read_as_fp16_is_named(kit, step):
    told = agrees(kit, step, answer_over_page(step, rope_as_fp16))
    assert told == f"  agrees   with: {FP16} (rows 0, 1, 2, 3)"


def answer_as_e5m2(step, *, specials):
    """A kernel's answer whose FP8 codes are read as e5m2: with its infinities and NaN, or as numbers throughout."""
    sight = sight_of(step, dsv4_reference)
    codes, exponents = dsv4_reference.quantise(sight.bank)
    values = codes.view(torch.float8_e5m2).float()
    if not specials:
        bits = codes.view(torch.uint8)
        beyond = (bits & 0x7C) == 0x7C
        number = (1 + (bits & 3).float() / 4) * 2.0**16
        values = torch.where(beyond, torch.where(bits >= 128, -number, number), values)
    nope = values.double() * torch.exp2(exponents.double() - 127).repeat_interleave(64, dim=1)
    keys = torch.cat([nope, sight.bank[:, 448:].double()], dim=1)
    out, lse = dsv4_reference.attend(step.q, keys, sight.index, step.sink, step.softmax_scale)
    return out.bfloat16(), lse.float()


def test_codes_read_as_e5m2_are_named_where_all_are_numbers(kit, step):
    told = agrees(kit, step, answer_as_e5m2(step, specials=False))
    assert told == f"  agrees   with: {E5M2} (rows 0, 1, 2, 3)"


def test_codes_read_as_e5m2_are_named_in_rows_whose_codes_are_below_384(kit):
    """Elements up to 0.7 under a scale of 2^-9."""
    step = kit.step("small-codes", 0, (3, 20), sink="per-head")
    small = kit.replace(step, tokens=step.tokens.clamp(-0.7, 0.7))
    told = agrees(kit, small, answer_as_e5m2(small, specials=True))
    assert told == f"  agrees   with: {E5M2} (rows 0, 1)"


def test_codes_read_as_e5m2_are_among_what_makes_all_nan(kit, step):
    out, lse = answer_as_e5m2(step, specials=True)
    assert bool(out.isnan().all())
    assert agrees(kit, step, (out, lse)) == f"  agrees   with: {UNWRITTEN} (rows 0, 1, 2, 3)"


def test_codes_below_384_read_as_e5m2_are_not_what_makes_all_nan(kit):
    step = kit.step("small-codes", 0, (3, 20), sink="per-head")
    small = kit.replace(step, tokens=step.tokens.clamp(-0.7, 0.7))
    out, lse = kit.kernel(small)
    told = agrees(kit, small, (out * torch.nan, lse * torch.nan))
    assert told.startswith("  agrees   with: NaN in every row, as from a slot ")
    assert "e5m2" not in told


def scales_of_the_next_token(page, tokens):
    page = page.copy()
    scales_of(page, tokens)[:] = np.roll(scales_of(page, tokens), -1, axis=0)
    return page


def rope_with_halves_swapped(page, tokens):
    page = page.copy()
    rope = page[: tokens * 576].reshape(tokens, 576)[:, 448:]
    rope[:] = np.roll(rope, 64, axis=1)
    return page


@pytest.mark.parametrize(
    "misread",
    [shifted(2, "wraps"), shifted(-2, "stays"), scales_of_the_next_token, rope_with_halves_swapped],
    ids=["two groups on", "two groups back", "next token", "halves of rope"],
)
def test_neighbouring_mistakes_have_no_name(kit, step, misread):
    assert agrees(kit, step, answer_over_page(step, misread)) == "  agrees   with no known mistake"


def test_no_scale_of_a_neighbour_is_seen_where_all_groups_have_one(kit):
    """Their scales are equal, so a shift changes nothing: what is wrong then is something else."""
    step = kit.step("equal-scales", 4, (400,), sink="per-head")
    tokens, entries = step.tokens.clone(), step.entries.clone()
    tokens[:, ::64], entries[:, ::64] = 0.96, 0.96
    equal = kit.replace(step, tokens=tokens, entries=entries)
    assert kit.one(equal, answer_over_page(equal, shifted(1, "wraps"))).outcome != "failed"
    out, lse = kit.kernel(equal)
    assert agrees(kit, equal, (out + 1, lse + 1)) == "  agrees   with no known mistake"


def test_exponents_are_those_that_the_reference_stores():
    generator = torch.Generator().manual_seed(7)
    size = torch.exp2(torch.randint(-24, 9, (4000, 1), generator=generator).float())
    k = (torch.randn(4000, 512, generator=generator) * size).bfloat16()
    k[0] = 0
    k[1, ::64] = 448.0  # the largest value under 2^0
    k[1, 1::64] = 0.5
    stored = dsv4_reference.quantise(k)[1].to(torch.int32) - 127
    assert torch.equal(scale_exponents(k), stored)
