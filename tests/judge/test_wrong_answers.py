"""Each kind of wrong answer is caught, and the message says what it is."""

import math

import dsv4_reference
import pytest
import torch


@pytest.fixture
def step(kit):
    """Four requests, windows full and not, both kinds of entries' edges, a sink in every head."""
    return kit.step("wrong-answers", 4, (9, 130, 400, 2300), heads=16, sink="per-head")


def failure(kit, step, out_lse):
    verdict = kit.one(step, out_lse, name="r4-eager-decode-wrong")
    assert verdict.outcome == "failed"
    assert verdict.margin > 1
    lines = verdict.message.splitlines()
    assert len(lines) <= 25
    assert all(len(line) <= 200 for line in lines)
    assert lines[0].startswith("r4-eager-decode-wrong: failed on under-test (cpu)")
    assert lines[-1].split(maxsplit=1)[1] == "dsv4-matrix run --cells r4-eager-decode-wrong --backend under-test"
    assert lines[-2].split()[0] == "seed"
    return verdict


def test_the_right_answer_passes(kit, step):
    verdict = kit.one(step)
    assert (verdict.outcome, verdict.message) == ("passed", "")
    assert 0 < verdict.margin <= 0.7


@pytest.mark.parametrize(
    ("mistake", "named", "rows"),
    [
        ({"window": 127}, "window 127", "rows 1, 2, 3"),
        ({"window": 129}, "window 129", "rows 1, 2, 3"),
        ({"sink": False}, "sink left out", "rows 0, 1, 2, 3"),
    ],
)
def test_a_key_too_few_or_too_many_is_named_with_its_rows(kit, step, mistake, named, rows):
    verdict = failure(kit, step, kit.kernel(step, **mistake))
    assert f"{named} ({rows}" in verdict.message


def test_an_entry_early_is_named(kit):
    step = kit.step("early", 128, (126, 254, 700))
    verdict = failure(kit, step, kit.kernel(step, early=1))
    assert "compressed entry early (rows 0, 1, 2)" in verdict.message


def test_nan_is_located_and_counted(kit, step):
    out, lse = kit.kernel(step)
    out[2, 7, 100:103] = math.nan
    verdict = failure(kit, step, (out, lse))
    assert "row 2 (request 2, position 400), head 7, element 100" in verdict.message
    assert "3 positions differ" in verdict.message
    assert "got      nan" in verdict.message


def test_an_infinity_is_no_poison(kit, step):
    out, lse = kit.kernel(step)
    out[1, 3, 5] = math.inf
    assert "poison" not in failure(kit, step, (out, lse)).message


def cut(step, length):
    """The step with each C4 list cut to ``length`` entries, as a kernel with a wrong length would see it."""
    selection = step.selection.clone()
    selection[:, length:] = -1
    return selection


def test_a_list_without_its_last_entry_is_named(kit):
    """As when the list of entries is given the length of the window's: 128 of 129 entries at position 515."""
    step = kit.step("list-short-by-one", 4, (515,), sink="per-head")
    assert int((step.selection >= 0).sum()) == 129
    assert int(step.selection[0, 128]) not in (0, 128), "the last one of the list is neither the oldest nor the newest"
    answer = kit.kernel(kit.replace(step, selection=cut(step, 128)))
    message = failure(kit, step, answer).message
    assert "agrees   with: last compressed entry of the list missing (row 0)" in message


def test_a_list_as_short_as_the_windows_is_named(kit):
    step = kit.step("list-short", 4, (719,), sink="per-head")
    answer = kit.kernel(kit.replace(step, selection=cut(step, 128)))
    message = failure(kit, step, answer).message
    assert "agrees   with: compressed entries cut to the length of the window's list (row 0)" in message


def test_a_c128_list_without_its_last_entry_has_both_names(kit):
    step = kit.step("list-short-c128", 128, (515,), sink="per-head")
    bank, index = kit.keys(step)
    short = index.clone()
    short[0, int((index[0] >= 0).nonzero().max())] = -1
    out, lse = dsv4_reference.attend(step.q, bank, short, step.sink, step.softmax_scale)
    message = failure(kit, step, (out.bfloat16(), lse.float())).message
    for name in ("newest entry dropped", "last compressed entry of the list missing"):
        assert f"{name} (row 0)" in message


def over_keys(kit, step, change):
    """The answer of a kernel after ``change(bank, index)``; index columns are the window from its newest token on, 128
    of them here, then the entries in the list's order."""
    bank, index = kit.keys(step)
    bank, index = change(bank, index.clone())
    out, lse = dsv4_reference.attend(step.q, bank, index, step.sink, step.softmax_scale)
    return out.bfloat16(), lse.float()


def without(*columns):
    def change(bank, index):
        assert bool((index[0, list(columns)] >= 0).all())
        index[0, list(columns)] = -1
        return bank, index

    return change


BOTH = "both lists one key short, the window's {} token and the last compressed entry"


@pytest.mark.parametrize(("column", "end"), [(127, "oldest"), (0, "newest")])
@pytest.mark.parametrize(("ratio", "last"), [(4, 128 + 128), (128, 128 + 3)])
def test_both_lists_short_by_one_are_named(kit, ratio, last, column, end):
    """As when every length is one too small, from either end of the window's list."""
    step = kit.step(f"both-short-{ratio}", ratio, (515,), sink="per-head")
    message = failure(kit, step, over_keys(kit, step, without(column, last))).message
    assert f"agrees   with: {BOTH.format(end)} (row 0)\n" in message


@pytest.mark.parametrize(
    ("column", "named"), [(127, "window 127"), (0, "newest token dropped"), (256, "last compressed")]
)
def test_one_list_short_by_one_is_not_both(kit, column, named):
    step = kit.step("one-list-short", 4, (515,), sink="per-head")
    message = failure(kit, step, over_keys(kit, step, without(column))).message
    assert f"agrees   with: {named}" in message
    assert "both lists" not in message


def test_two_keys_in_the_middle_of_both_lists_are_no_known_mistake(kit):
    step = kit.step("two-missing", 4, (515,), sink="per-head")
    step = kit.replace(step, q=(0.1 * step.q.float()).bfloat16())  # flat: no key is all that a head sees
    message = failure(kit, step, over_keys(kit, step, without(60, 200))).message
    assert "agrees   with no known mistake" in message


@pytest.mark.parametrize(
    ("factor", "scaled", "named"),
    [
        (2.0, 512, "all keys twice as large"),
        (0.5, 512, "all keys half as large"),
        (2.0, 448, "elements 0 to 447 of all keys twice as large, as under scales of another bias"),
        (0.5, 448, "elements 0 to 447 of all keys half as large, as under scales of another bias"),
    ],
)
def test_keys_in_another_scale_are_named(kit, step, factor, scaled, named):
    def change(bank, index):
        bank[:, :scaled] *= factor
        return bank, index

    message = failure(kit, step, over_keys(kit, step, change)).message
    assert f"agrees   with: {named} (rows 0, 1, 2, 3)\n" in message


@pytest.mark.parametrize(("factor", "scaled"), [(1.5, 512), (2.0, 64), (1.05, 448)])
def test_keys_in_a_scale_that_nothing_gives_are_no_known_mistake(kit, step, factor, scaled):
    def change(bank, index):
        bank[:, :scaled] *= factor
        return bank, index

    assert "agrees   with no known mistake" in failure(kit, step, over_keys(kit, step, change)).message


@pytest.mark.parametrize(
    ("columns", "named"),
    [(slice(128, None), "no compressed entry seen"), (slice(0, 128), "no token of the window seen")],
)
@pytest.mark.parametrize("ratio", [4, 128])
def test_a_list_that_is_left_out_is_named(kit, ratio, columns, named):
    step = kit.step(f"one-list-{ratio}", ratio, (515,), sink="per-head")

    def change(bank, index):
        index[:, columns] = -1
        return bank, index

    assert f"agrees   with: {named} (row 0)\n" in failure(kit, step, over_keys(kit, step, change)).message


def test_an_output_of_another_size_under_the_right_scores_is_not_of_other_keys(kit):
    """One key and no sink: twice the output is what twice the key would give, but for the log-sum-exp."""
    step = kit.step("one-key", 0, (0,))
    out, lse = kit.kernel(step)
    assert "agrees   with no known mistake" in failure(kit, step, (2 * out, lse)).message
    over = over_keys(kit, step, lambda bank, index: (2 * bank, index))
    assert "agrees   with: all keys twice as large (row 0)" in failure(kit, step, over).message


def test_what_bf16_holds_exactly_is_not_rounded_towards_zero(kit):
    """One key and no sink: the output is the key, which was bf16 before; here without its last 64 elements."""
    step = kit.step("one-exact-key", 0, (0,))
    out, lse = kit.kernel(step)
    out[..., 448:] = 0
    assert "agrees   with no known mistake" in failure(kit, step, (out, lse)).message


def test_rows_that_nothing_explains_are_told_beside_those_that_something_does(kit, step):
    out, lse = kit.kernel(step, window=127)
    out[2:] += 1
    message = failure(kit, step, (out, lse)).message
    assert "failing  rows 1, 2, 3 of 4" in message
    assert "agrees   with: window 127 (row 1); no known mistake in rows 2, 3\n" in message


def test_rows_that_nobody_looked_at_are_counted(kit):
    step = kit.step("many-rows", 0, tuple(range(127, 146)))
    message = failure(kit, step, kit.kernel(step, window=127)).message
    assert "failing  rows 0, 1, 2, 3, 4, 5, 6, 7 and 11 more of 19" in message
    assert "agrees   with: window 127 (rows 0, 1, 2, 3, 4, 5, 6, 7 and 8 more); 3 more not looked at\n" in message


def test_a_dropped_key_that_had_all_the_weight_is_named(kit):
    """Where the weight of all others is lost beside it, what they give is not to be had from the right answer."""
    step = kit.step("all-the-weight", 0, (5,), sink="per-head")
    key = step.tokens[5].float()
    peaked = kit.replace(step, q=(80 * key / (kit.scale * key.dot(key)) * torch.ones(16, 1))[None].bfloat16())
    answer = over_keys(kit, peaked, without(0))
    assert "agrees   with: newest token dropped (row 0)" in failure(kit, peaked, answer).message


def test_a_key_that_is_not_finite_must_not_come_out_finite(kit, step):
    tokens = step.tokens.clone()
    tokens[step.token_base[3] + 2290, 70] = math.inf
    poisoned = kit.replace(step, tokens=tokens)
    out, lse = kit.kernel(poisoned)
    assert bool(out[3].isnan().all())
    assert kit.one(poisoned, (out, lse)).outcome == "passed"
    finite, finite_lse = kit.kernel(step)
    assert "row 3 (request 3, position 2300)" in failure(kit, poisoned, (finite, lse)).message
    assert "got      " in failure(kit, poisoned, (out, finite_lse)).message


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinity_is_located(kit, step, value):
    out, lse = kit.kernel(step)
    out[1, 3, 5] = value
    assert "row 1 (request 1, position 130), head 3, element 5" in failure(kit, step, (out, lse)).message


def test_heads_in_another_order(kit, step):
    out, lse = kit.kernel(step)
    verdict = failure(kit, step, (out.flip(1), lse))
    assert "heads in reverse order (rows 0, 1, 2, 3)" in verdict.message


def test_heads_and_elements_transposed(kit, step):
    out, lse = kit.kernel(step)
    verdict = failure(kit, step, (out.mT.reshape(out.shape).contiguous(), lse))
    assert "[heads, 512] written as [512, heads]" in verdict.message


def test_a_row_that_reads_another_requests_page(kit, step):
    wrong = kit.replace(step, request=torch.tensor([0, 1, 1, 3]), positions=torch.tensor([9, 130, 130, 2300]))
    out, lse = kit.kernel(step)
    swapped, swapped_lse = kit.kernel(wrong)
    out[2], lse[2] = swapped[2], swapped_lse[2]
    verdict = failure(kit, step, (out, lse))
    assert "row 2 of 4" in verdict.message
    assert "row 2 (request 2, position 400)" in verdict.message


def test_a_row_answered_at_another_rows_place(kit, step):
    out, lse = kit.kernel(step)
    out[2], lse[2] = out[0], lse[0]
    assert "the answer of row 0 (row 2)" in failure(kit, step, (out, lse)).message


def test_a_row_left_from_an_earlier_replay(kit, step):
    later = kit.step("later", 4, (10, 131, 401, 2301), heads=16, sink="per-head")
    earlier, now = kit.kernel(step), kit.kernel(later)
    stale = (now[0].clone(), now[1].clone())
    stale[0][3], stale[1][3] = earlier[0][3], earlier[1][3]
    observations = [
        kit.observe(earlier, 0, "replay 0", True),
        kit.observe(stale, 1, "replay 1", True),
    ]
    verdict = kit.verdict(kit.scenario("stale", step, later), *observations)
    assert verdict.outcome == "failed"
    assert 'leg "replay 1", step 1' in verdict.message
    assert 'bit for bit row 3 of leg "replay 0", step 0 (row 3)' in verdict.message


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda lse, sink: lse / math.log(2), "lse in base 2"),
        (lambda lse, sink: torch.logaddexp(lse, sink), "lse with the sink counted in"),
        (lambda lse, sink: -lse, "lse negated"),
    ],
)
def test_a_wrong_log_sum_exp_is_caught_on_its_own(kit, step, change, named):
    out, lse = kit.kernel(step)
    verdict = failure(kit, step, (out, change(lse, step.sink)))
    assert f"{named} (rows 0, 1, 2, 3)" in verdict.message
    assert "tensor   lse; worst at row" in verdict.message
    assert "max 0, mean 0, lse 64 of 64" in verdict.message


def test_a_log_sum_exp_that_is_a_little_off_has_no_form(kit):
    """Without a sink, and in a row with keys, it is the right one in two of the forms."""
    step = kit.step("a-little-off", 0, (70,))
    out, lse = kit.kernel(step)
    bits = lse.view(torch.int32)
    while kit.one(step, (out, lse)).outcome == "passed":
        bits[0, 3] += 1
    assert "agrees   with no known mistake" in failure(kit, step, (out, lse)).message


def test_one_element_off_by_three_ulps(kit, step):
    out, lse = kit.kernel(step)
    element = int(out[1, 4].abs().argmax())
    out.view(torch.int16)[1, 4, element] += 3
    verdict = failure(kit, step, (out, lse))
    assert f"row 1 (request 1, position 130), head 4, element {element}" in verdict.message
    assert "max 1, mean 0" in verdict.message
    assert "(low-precision baseline)" in verdict.message


def test_a_small_gain_is_caught_by_mean_and_bias(kit, step):
    out, lse = kit.kernel(step)
    verdict = failure(kit, step, ((out.float() * (1 + 2**-7)).bfloat16(), lse))
    assert "mean 0" not in verdict.message
    assert "bias 4" in verdict.message


def test_a_row_without_keys_must_be_exactly_zero_and_inf(kit, step):
    empty = kit.replace(step, positions=torch.tensor([-1, 130, 400, 2300]))
    out, lse = kit.kernel(step)
    out[0], lse[0] = 0, math.inf
    assert kit.one(empty, (out, lse)).outcome == "passed"
    touched = out.clone()
    touched[0, 5, 6] = 1e-30
    assert "row 0 (request 0, position -1), head 5, element 6" in failure(kit, empty, (touched, lse)).message
    for wrong, named in ((-math.inf, "lse -inf instead of +inf"), (-5e4, "got      -50000   want inf")):
        other = lse.clone()
        other[0] = wrong
        assert named in failure(kit, empty, (out, other)).message


def test_zeros_where_keys_exist(kit, step):
    out, lse = kit.kernel(step)
    out[3] = 0
    assert "zeros, as for a row without keys (row 3)" in failure(kit, step, (out, lse)).message


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda out, lse: (out.float(), lse), "out: expected bfloat16 [4, 16, 512] on cpu; got float32 [4, 16, 512]"),
        (lambda out, lse: (out[:3], lse), "out: expected bfloat16 [4, 16, 512] on cpu; got bfloat16 [3, 16, 512]"),
        (lambda out, lse: (out, lse.double()), "lse: expected float32 [4, 16] on cpu; got float64 [4, 16]"),
        (lambda out, lse: (out, lse.T), "lse: expected float32 [4, 16] on cpu; got float32 [16, 4]"),
        (lambda out, lse: (out.to("meta"), lse), "got bfloat16 [4, 16, 512] on meta"),
        (lambda out, lse: (None, lse), "expected a tensor, bfloat16 [4, 16, 512] on cpu; got NoneType"),
    ],
)
def test_wrong_types_and_shapes(kit, step, change, named):
    assert named in failure(kit, step, change(*kit.kernel(step))).message


def test_truncation_instead_of_rounding_is_caught(kit, step):
    """Each element is within twice an honest error: what Triton's interpreter does to a bare bf16 store."""
    _, lse = kit.kernel(step)
    bank, index = kit.keys(step)
    exact, _ = dsv4_reference.attend(step.q, bank, index, step.sink, step.softmax_scale)
    truncated = (exact.float().view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()
    verdict = failure(kit, step, (truncated, lse))
    assert "max 0, mean 0, lse 0 of 64 (row, head) pairs; bias 4, cosine 0 of 4 rows" in verdict.message
    assert "signed mean error (negative: too small) -" in verdict.message
    assert "rounded towards zero instead of to nearest (rows 0, 1, 2, 3)" in verdict.message


def test_other_failing_answers_are_counted(kit, step):
    right, wrong = kit.kernel(step), kit.kernel(step, window=127)
    legs = [kit.observe(right, leg="dense"), *(kit.observe(wrong, leg=f"leg {n}") for n in range(3))]
    message = kit.verdict(kit.scenario("legs", step), *legs).message
    assert 'leg "leg 0"' in message.splitlines()[0]
    assert '2 more answers fail: "leg 1" step 0, "leg 2" step 0' in message
