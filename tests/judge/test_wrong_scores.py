"""Another softmax scale, and lengths kept from a graph's capture, are named, and only those that are."""

import math

import dsv4_reference
import pytest
import torch

OWN = 512**-0.5


@pytest.fixture
def step(kit):
    """One row with a single key, one whose window is not full, and two with both lists."""
    return kit.step("wrong-scores", 4, (0, 9, 400, 2300), heads=16, sink="per-head")


def agrees(kit, step, answer, graph=False):
    verdict = kit.verdict(kit.scenario("wrong-scores", step), kit.observe(answer, graph=graph))
    assert verdict.outcome == "failed"
    return next(line for line in verdict.message.splitlines() if line.startswith("  agrees"))


def scaled(kit, step, scale):
    bank, index = kit.keys(step)
    out, lse = dsv4_reference.attend(step.q, bank, index, step.sink, scale)
    return out.bfloat16(), lse.float()


SCALES = [
    (576**-0.5, "softmax scale 1/sqrt(576)"),
    (448**-0.5, "softmax scale 1/sqrt(448)"),
    (192**-0.5, "softmax scale 1/sqrt(192)"),
    (128**-0.5, "softmax scale 1/sqrt(128)"),
    (64**-0.5, "softmax scale 1/sqrt(64)"),
    (1.0, "no softmax scale"),
    (1 / 512, "softmax scale applied twice"),
    (OWN * math.log(2), "log2(e) left out, as exp2 of scores meant for exp"),
    (OWN / math.log(2), "log2(e) in the scores of exp, or twice in those of exp2"),
]


@pytest.mark.parametrize(("scale", "named"), SCALES)
def test_another_softmax_scale_is_named(kit, step, scale, named):
    told = agrees(kit, step, scaled(kit, step, scale)).removeprefix(f"  agrees   with: {named} (rows 0, 1, 2, 3)")
    # The log-sum-exp of a single key is its score, in base 2 by either of two mistakes.
    assert told == ("; lse in base 2 (row 0)" if scale == OWN / math.log(2) else "")


@pytest.mark.parametrize(
    "change",
    [lambda lse, sink: lse / math.log(2), lambda lse, sink: torch.logaddexp(lse, sink)],
    ids=["base 2", "with the sink"],
)
def test_another_softmax_scale_is_named_whatever_form_the_log_sum_exp_has(kit, step, change):
    out, lse = scaled(kit, step, 576**-0.5)
    told = agrees(kit, step, (out, change(lse, step.sink)))
    assert told.startswith("  agrees   with: softmax scale 1/sqrt(576) (rows ")


@pytest.mark.parametrize("scale", [500**-0.5, 464**-0.5, 560**-0.5, OWN * 1.02, OWN * 4])
def test_a_scale_that_nothing_gives_has_no_name(kit, step, scale):
    assert agrees(kit, step, scaled(kit, step, scale)) == "  agrees   with no known mistake"


def test_the_right_scale_passes_and_a_wrong_sum_beside_it_is_not_of_a_scale(kit, step):
    out, lse = scaled(kit, step, OWN)
    assert kit.one(step, (out, lse)).outcome == "passed"
    assert "scale" not in agrees(kit, step, (out, lse / math.log(2)))


def test_an_output_under_another_scale_with_the_right_sum_is_not_of_a_scale(kit, step):
    """A kernel takes both from the same scores."""
    out, _ = scaled(kit, step, 1.0)
    _, lse = scaled(kit, step, OWN)
    assert "scale" not in agrees(kit, step, (out, lse))


def short(kit, step, tokens, entries):
    """Answers over so many of the window's tokens, from its newest on or, if negative, its oldest, and so many of the
    list's entries."""
    bank, index = kit.keys(step)
    index, window = index.clone(), index[:, :128].clone()
    index[:, :128] = -1
    for row in range(len(index)):
        seen = window[row][window[row] >= 0].sort(descending=True).values
        kept = seen[:tokens] if tokens > 0 else seen[tokens:]
        index[row, : len(kept)] = kept
    index[:, 128 + entries :] = -1
    out, lse = dsv4_reference.attend(step.q, bank, index, step.sink, step.softmax_scale)
    return out.bfloat16(), lse.float()


KEPT = "as under lengths kept from the capture"


@pytest.mark.parametrize(
    ("tokens", "what"),
    [(1, "newest token"), (-1, "oldest token"), (4, "4 newest tokens"), (-8, "8 oldest tokens")],
)
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_lengths_of_the_capture_are_named(kit, ratio, tokens, what):
    step = kit.step(f"captured-{ratio}", ratio, (300, 700), sink="per-head")
    told = agrees(kit, step, short(kit, step, tokens, entries=0), graph=True)
    assert told == f"  agrees   with: only the window's {what} seen, {KEPT} (rows 0, 1)"


@pytest.mark.parametrize(("tokens", "what"), [(1, "newest token"), (-3, "3 oldest tokens")])
@pytest.mark.parametrize(
    ("entries", "which"), [(1, "the list's first compressed entry"), (512, "all compressed entries")]
)
@pytest.mark.parametrize("ratio", [4, 128])
def test_what_is_seen_of_the_entries_is_told(kit, ratio, entries, which, tokens, what):
    step = kit.step(f"captured-{ratio}", ratio, (300, 700), sink="per-head")
    told = agrees(kit, step, short(kit, step, tokens, entries), graph=True)
    assert told == f"  agrees   with: only the window's {what} and {which} seen, {KEPT} (rows 0, 1)"


def test_no_capture_is_blamed_for_an_eager_answer(kit):
    step = kit.step("captured-4", 4, (300, 700), sink="per-head")
    assert "capture" not in agrees(kit, step, short(kit, step, 1, entries=0))


@pytest.mark.parametrize(("tokens", "entries"), [(9, 0), (-64, 0), (1, 3)])
def test_lists_of_another_length_have_no_name(kit, tokens, entries):
    step = kit.step("captured-4", 4, (300, 700), sink="per-head")
    told = agrees(kit, step, short(kit, step, tokens, entries), graph=True)
    assert told == "  agrees   with no known mistake"


def test_a_list_that_is_left_out_is_not_of_a_capture(kit):
    step = kit.step("captured-4", 4, (300, 700), sink="per-head")
    told = agrees(kit, step, short(kit, step, 128, entries=0), graph=True)
    assert told == "  agrees   with: no compressed entry seen (rows 0, 1)"


def test_a_row_as_short_as_at_the_capture_is_right(kit):
    """Beside one that is not: its lengths are those of the capture, so nothing is wrong with it."""
    step = kit.step("captured-short", 4, (0, 300), sink="per-head")
    told = agrees(kit, step, short(kit, step, 1, entries=0), graph=True)
    assert told == f"  agrees   with: only the window's newest token seen, {KEPT} (row 1)"


def test_a_short_row_that_lacks_one_key_is_not_of_a_capture(kit):
    step = kit.step("captured-lacks-one", 0, (5,), sink="per-head")
    told = agrees(kit, step, short(kit, step, 5, entries=0), graph=True)
    assert told == "  agrees   with: oldest token dropped (row 0)"
