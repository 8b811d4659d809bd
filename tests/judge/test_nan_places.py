"""NaN that was read and NaN that was computed are told apart, as far as the rows and their log-sum-exps allow."""

import math

import pytest
import torch

SLOT = "a slot that holds no live key"
UNWRITTEN = f"{SLOT} or a scale byte that nothing wrote"
ARITHMETIC = "0/0 or -inf - -inf"
NO_KEYS = f"in every row without keys and no other, as of {ARITHMETIC}"


@pytest.fixture
def step(kit):
    """Four requests, windows full and not, both kinds of entries' edges, a sink in every head."""
    return kit.step("nan-places", 4, (9, 130, 400, 2300), heads=16, sink="per-head")


def agrees(kit, step, answer):
    verdict = kit.one(step, answer)
    assert verdict.outcome == "failed"
    told = next(line for line in verdict.message.splitlines() if line.startswith("  agrees"))
    assert "more" in told or len(told) <= 200
    return told


def test_a_poisoned_slot_that_was_read_is_named(kit, step):
    out, lse = kit.kernel(step)
    out[1], lse[1] = math.nan, math.nan
    assert (
        agrees(kit, step, (out, lse)) == f"  agrees   with: poison reached the output: NaN, as from {UNWRITTEN} (row 1)"
    )


def test_a_masked_slot_that_was_multiplied_by_zero_is_named(kit, step):
    out, lse = kit.kernel(step)
    out[1:3] = math.nan
    named = f"NaN beside the right lse, as of an unwritten output or of 0 x NaN from {SLOT}"
    told = agrees(kit, step, (out, lse))
    assert told == f"  agrees   with: poison reached the output: {named} (rows 1, 2)"


@pytest.mark.parametrize(
    ("heads", "elements", "named"),
    [
        (slice(3, 5), slice(None), "NaN in 2 whole heads, as of an output, a query or a sink that nothing wrote"),
        (
            slice(None),
            slice(448, 512),
            "NaN in elements 448 to 511 of every head, as from a part of a key that nothing wrote",
        ),
        (slice(3, 5), slice(7, 9), "NaN in part, as of an output that nothing wrote"),
    ],
)
@pytest.mark.parametrize("rows", [slice(2, 3), slice(None)], ids=["one row", "all rows"])
def test_poison_that_reached_a_part_of_the_output_is_named(kit, step, heads, elements, named, rows):
    out, lse = kit.kernel(step)
    out[rows, heads, elements] = math.nan
    assert f"agrees   with: poison reached the output: {named} (row" in agrees(kit, step, (out, lse))


def test_poison_in_the_log_sum_exp_alone_is_named(kit, step):
    out, lse = kit.kernel(step)
    lse[1, 3] = math.nan
    told = agrees(kit, step, (out, lse))
    assert told == "  agrees   with: poison reached the lse: NaN, as of one that nothing wrote (row 1)"


def without_keys(kit, step, *rows):
    """The step with requests that see nothing, and the right answer to it."""
    positions = step.positions.clone()
    positions[list(rows)] = -1
    out, lse = kit.kernel(step)
    out[list(rows)], lse[list(rows)] = 0, math.inf
    empty = kit.replace(step, positions=positions)
    assert kit.one(empty, (out, lse)).outcome == "passed"
    return empty, out, lse


@pytest.mark.parametrize("said", [math.nan, math.inf, -math.inf])
def test_rows_without_keys_are_not_poisoned(kit, step, said):
    """0/0 beside the right log-sum-exp, beside log(0), and beside that of -inf - -inf."""
    empty, out, lse = without_keys(kit, step, 0, 2)
    out[[0, 2]], lse[[0, 2]] = math.nan, said
    told = agrees(kit, empty, (out, lse))
    assert f"NaN {NO_KEYS} (rows 0, 2)" in told
    assert "poison" not in told


def test_a_log_sum_exp_of_rows_without_keys_is_not_poisoned(kit, step):
    empty, out, lse = without_keys(kit, step, 0, 2)
    lse[[0, 2]] = math.nan
    assert agrees(kit, empty, (out, lse)) == f"  agrees   with: lse NaN {NO_KEYS} (rows 0, 2)"


def test_one_of_two_rows_without_keys_is_poisoned(kit, step):
    empty, out, lse = without_keys(kit, step, 0, 2)
    out[2] = math.nan
    assert "poison reached the output: NaN beside the right lse" in agrees(kit, empty, (out, lse))


def test_a_row_with_keys_beside_those_without_is_poisoned(kit, step):
    empty, out, lse = without_keys(kit, step, 0, 2)
    out[[0, 2, 3]], lse[[0, 2, 3]] = math.nan, math.nan
    told = agrees(kit, empty, (out, lse))
    assert told == f"  agrees   with: poison reached the output: NaN, as from {UNWRITTEN} (rows 0, 2, 3)"


@pytest.mark.parametrize(
    ("step", "named"),
    [
        (
            ("no-entries", 128, (9, 126, 127, 300)),
            f"NaN in every row without compressed entries and no other, as of {ARITHMETIC} over them or of {SLOT}",
        ),
        (
            ("not-full", 0, (9, 60, 127, 300)),
            f"NaN in every row whose window is not full and no other, as of {ARITHMETIC} where it ends or of {SLOT}",
        ),
    ],
    ids=["without compressed entries", "whose window is not full"],
)
def test_rows_of_a_kind_are_told(kit, step, named):
    step = kit.step(*step, sink="per-head")
    out, lse = kit.kernel(step)
    out[:2], lse[:2] = math.nan, math.nan
    assert agrees(kit, step, (out, lse)) == f"  agrees   with: {named} (rows 0, 1)"


def test_every_row_may_be_of_either(kit, step):
    out, lse = kit.kernel(step)
    told = agrees(kit, step, (out * math.nan, lse * math.nan))
    assert told.startswith(f"  agrees   with: NaN in every row, as from {UNWRITTEN}, ")
    assert told.endswith(" or of arithmetic that all share (rows 0, 1, 2, 3)")
    told = agrees(kit, step, (out * math.nan, lse))
    named = f"as of 0/0 without keys, of an unwritten output or of 0 x NaN from {SLOT}"
    assert told == f"  agrees   with: NaN in every row beside the right lse, {named} (rows 0, 1, 2, 3)"
    told = agrees(kit, step, (out, lse * math.nan))
    named = "lse NaN in every row, as of arithmetic or of one that nothing wrote"
    assert told == f"  agrees   with: {named} (rows 0, 1, 2, 3)"


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (-math.inf, "NaN beside an lse of -inf, as of 0/0 where no key was counted"),
        (math.inf, "NaN beside an lse of inf, as of an exp that overflowed or of 0/0 where no key was counted"),
    ],
)
@pytest.mark.parametrize("heads", [slice(3, 7), slice(None)], ids=["some heads", "all heads"])
def test_an_infinite_log_sum_exp_is_no_poison(kit, step, said, named, heads):
    """A key that is NaN would have made the sum NaN too."""
    out, lse = kit.kernel(step)
    out[1:3, heads], lse[1:3, heads] = math.nan, said
    assert agrees(kit, step, (out, lse)) == f"  agrees   with: {named} (rows 1, 2)"


def test_rows_that_owe_nan_are_not_told(kit, step):
    """Another row's poison is told by itself, and every row but those that owe it is every row."""
    tokens = step.tokens.clone()
    tokens[step.token_base[3] + 2290, 70] = math.inf
    owing = kit.replace(step, tokens=tokens)
    out, lse = kit.kernel(owing)
    assert bool(out[3].isnan().all())
    out[1] = math.nan
    assert "poison reached the output: NaN beside the right lse" in agrees(kit, owing, (out, lse))
    out[:3] = math.nan
    told = agrees(kit, owing, (out, lse))
    assert told.startswith("  agrees   with: NaN in every row beside the right lse, ")
    assert told.endswith(f" {SLOT} (rows 0, 1, 2)")


def test_rows_beyond_those_that_are_looked_at_count(kit):
    """Every row has it, although only the first 16 are told one by one."""
    step = kit.step("many", 0, tuple(range(127, 147)), sink="per-head")
    out, lse = kit.kernel(step)
    whole = agrees(kit, step, (torch.full_like(out, math.nan), lse))
    assert whole.startswith("  agrees   with: NaN in every row beside the right lse, ")
    out[:16] = math.nan
    assert "poison reached the output" in agrees(kit, step, (out, lse))
