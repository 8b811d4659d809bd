"""The Hopper kernel's decode, from its own PTX, for every e4m3 code under every scale byte: no GPU needed.

The few PTX instructions it uses are carried out here on integers and bf16 tensors; the factors that ``notes``
forms are restated, as no interpreter runs Gluon.
"""

from __future__ import annotations

import re

import pytest
import torch
from dsv4_reference.codec import dequantise

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

MASK = 0xFFFFFFFF


def prmt(word: int, selector: int) -> int:
    """PTX ``prmt.b32`` with zero as its second word, the sign mode of selector bit 3 included."""
    out = 0
    for place in range(4):
        nibble = (selector >> (4 * place)) & 15
        byte = (word >> (8 * (nibble & 3))) & 0xFF if nibble & 7 < 4 else 0
        if nibble & 8:
            byte = 0xFF if byte & 0x80 else 0
        out |= byte << (8 * place)
    return out


def instructions(twice: bool = True) -> list[list[str]]:
    from dsv4_triton.hopper.keys import DECODE_ONCE, DECODE_TWICE

    text = (DECODE_TWICE if twice else DECODE_ONCE).value.strip("{} ")
    lines = [line.strip() for line in text.split(";") if line.strip() and ".reg" not in line]
    return [re.split(r"[\s,]+", line) for line in lines]


def halves(words: torch.Tensor) -> torch.Tensor:
    """Words as bf16 pairs ``[N, 2]``, the low half first."""
    return torch.stack([words & 0xFFFF, words >> 16], 1).to(torch.int32).to(torch.int16).view(torch.bfloat16)


def decode(
    words: list[list[int]], first: int, second: int, listing: list[list[str]], flags: int = 0
) -> dict[str, object]:
    """Run the listing on four words at a time, ``words[i]`` being all that stand at place i.

    Returns what the results hold: bf16 ``[N, 2]`` in ``$0`` to ``$7`` (bytes 0 and 1 of each word, then 2 and 3), and
    flags ``[N]`` in ``$8``.
    """
    held: dict[str, object] = {f"${12 + i}": column for i, column in enumerate(words)}
    held["$24"] = [flags] * len(words[0])
    factors = {"$16": halves(torch.tensor([first])), "$20": halves(torch.tensor([second]))}
    two = {"and.b32": lambda a, b: a & b, "or.b32": lambda a, b: a | b, "add.u32": lambda a, b: (a + b) & MASK}
    for name, target, source, *more in listing:
        if name == "mov.b32":
            held[target] = held.get(source, [0] * len(words[0]))
            continue
        value = held[source]
        if name == "prmt.b32":
            assert more[0] == "0"
            held[target] = [prmt(word, int(more[1], 16)) for word in value]
        elif name == "shl.b32":
            held[target] = [(word << int(more[0])) & MASK for word in value]
        elif name in two:
            other = held.get(more[0]) or [int(more[0], 16)] * len(value)
            held[target] = [two[name](a, b) for a, b in zip(value, other, strict=True)]
        else:
            assert name == "mul.rn.bf16x2", name
            pairs = value if isinstance(value, torch.Tensor) else halves(torch.tensor(value))
            held[target] = pairs * factors[more[0]]
    return held


def factors_of(byte: int) -> tuple[int, int]:
    first = 0x7FC0 if byte == 255 else (min(byte, 134) + 120) << 7
    second = (max(byte, 134) - 7) << 7
    return first | first << 16, second | second << 16


def mistakes(listing: list[list[str]], scale_bytes: range = range(256)) -> int:
    """Codes and scales that come out other than the reference reads them; NaN codes are the flags' business."""
    codes = torch.arange(256, dtype=torch.uint8)
    finite = (codes & 0x7F) != 0x7F
    order = [codes, 255 - codes, codes ^ 0x55, codes ^ 0xAA]
    word = [sum(int(byte[i]) << (8 * at) for at, byte in enumerate(order)) for i in range(256)]
    turned = [word[-i:] + word[:-i] for i in range(4)]  # each of the four places has other codes
    wrong = 0
    for byte in scale_bytes:
        scales = torch.full((1, 7), byte, dtype=torch.uint8)
        row = torch.cat([codes, codes[:192]])[None]
        want = dequantise(row, scales)[0, :256].float().bfloat16()
        held = decode(turned, *factors_of(byte), listing)
        for place in range(4):
            results = (*held[f"${place}"].T, *held[f"${4 + place}"].T)
            for got, code in zip(results, order, strict=True):
                here = code.roll(place).long()
                expected = want[here]
                bits = got.contiguous().view(torch.int16) == expected.view(torch.int16)
                same = bits | (got.isnan() & expected.isnan())
                wrong += int((~same & finite[here]).sum())
    return wrong


NAN_BITS = 0x80808080
PLAIN = 0x7E00FE7E  # no NaN code in it


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("at", range(4))
def test_a_nan_code_is_flagged_wherever_it_is(place, at, twice):
    words = [[PLAIN] * 256 for _ in range(4)]
    words[place] = [PLAIN & ~(0xFF << (8 * at)) | code << (8 * at) for code in range(256)]
    flags = decode(words, 0, 0, instructions(twice))["$8"]
    assert [bool(flag & NAN_BITS) for flag in flags] == [code & 0x7F == 0x7F for code in range(256)]


def test_flags_are_added_to_what_came_before():
    words = [[PLAIN]] * 4
    assert [flag & NAN_BITS for flag in decode(words, 0, 0, instructions(), flags=0x8000)["$8"]] == [0x8000]


def test_every_code_under_every_scale():
    assert mistakes(instructions()) == 0


def test_one_factor_does_up_to_its_bound():
    """And not beyond it: blocks with larger scales have to take the way with two."""
    from dsv4_triton.hopper.notes import ONE_FACTOR

    bound = ONE_FACTOR.value
    assert mistakes(instructions(twice=False), range(bound + 1)) == 0
    assert mistakes(instructions(twice=False), range(bound + 1, bound + 2)) > 0


@pytest.mark.parametrize(("old", "new"), [("0x9180", "0x1100"), ("0x87f087f0", "0x07f007f0"), ("4", "3")])
def test_a_changed_instruction_is_seen(old, new):
    listing = [[new if part == old else part for part in line] for line in instructions()]
    assert listing != instructions()
    assert mistakes(listing) > 0
