"""The proof that a case can fail: its arithmetic, what it calls sensitive, and what it does not."""

import dataclasses

import dsv4_reference
import pytest
import torch

from dsv4_matrix.judge import Kind, applicable_kinds
from dsv4_matrix.judge.sensitivity import effects, perturbation_names, without_sink
from dsv4_matrix.judge.sight import sight_of
from dsv4_matrix.judge.truth import Oracle
from dsv4_matrix.judge.wrong_keys import edited

#: name, ratio, positions, selection width: rows of n keys.
SIZES = [
    ("one-key", 0, (0,), 0),
    ("two-keys", 0, (1, 1), 0),
    ("64-keys", 0, (63, 63), 0),
    ("128-keys", 0, (127, 128, 300), 0),
    ("c4-start", 4, (2, 3, 4, 64, 130), 512),
    ("c128-edges", 128, (126, 127, 128, 255, 1000), 0),
    ("640-keys", 4, (2100,), 512),
    ("1152-keys", 4, (4200,), 1024),
    ("8320-keys", 4, (33000,), 8192),
]


def oracle_of(step, budget):
    return Oracle.of(dsv4_reference, step, sight_of(step, dsv4_reference), budget)


@pytest.mark.parametrize(("heads", "sink"), [(16, "off"), (16, "zero"), (64, "per-head")])
@pytest.mark.parametrize(("name", "ratio", "positions", "topk"), SIZES, ids=[size[0] for size in SIZES])
def test_peaked_queries_see_every_perturbation(kit, name, ratio, positions, topk, heads, sink):
    step = kit.step(f"{name}-{heads}-{sink}", ratio, positions, heads=heads, sink=sink, topk=topk)
    verdict = kit.one(step)
    assert verdict.outcome == "passed", verdict.message
    assert verdict.margin <= 0.7
    assert set(verdict.weakest) == applicable_kinds(kit.scenario("any", step))
    assert min(verdict.weakest.values()) > 50


@pytest.mark.parametrize(
    ("style", "ratio", "positions", "blind"),
    [
        ("zero", 4, (4200,), "oldest entry dropped"),
        ("flat", 4, (33000,), "window 127"),
        ("constant", 0, (200,), "newest token dropped"),
    ],
)
def test_a_case_that_cannot_fail_is_insensitive(kit, style, ratio, positions, blind):
    step = kit.step(f"blind-{style}", ratio, positions, topk=8192, style=style)
    verdict = kit.one(step)
    assert verdict.outcome == "insensitive"
    assert verdict.margin <= 1
    assert min(verdict.weakest.values()) <= 1
    assert blind in verdict.message
    assert "step 0, row 0, effect is" in verdict.message
    assert len(verdict.message.splitlines()) <= 25


def test_a_sink_too_low_to_see_is_insensitive(kit):
    step = kit.step("low-sink", 0, (130,))
    verdict = kit.one(kit.replace(step, sink=torch.full((16,), -60.0)))
    assert verdict.outcome == "insensitive"
    assert "sink left out: step 0, row 0" in verdict.message
    assert [name for name, effect in verdict.weakest.items() if effect <= 1] == [Kind.SINK]


def test_one_blind_row_among_seeing_rows_is_found(kit):
    step = kit.step("one-blind-row", 4, (4200, 4200, 4200), topk=1024)
    q = step.q.clone()
    q[1] = 0
    verdict = kit.one(kit.replace(step, q=q))
    assert verdict.outcome == "insensitive"
    assert "row 1" in verdict.message
    assert "row 0," not in verdict.message
    assert "row 2," not in verdict.message


@pytest.mark.parametrize("sink", ["off", "per-head"])
@pytest.mark.parametrize(
    ("ratio", "positions"), [(0, (0, 1, 126, 127, 128, 300)), (4, (2, 7, 40, 2100)), (128, (0, 127, 700))]
)
def test_an_edit_is_attention_over_the_edited_keys(kit, tolerances, ratio, positions, sink):
    step = kit.step("closed-forms", ratio, positions, sink=sink)
    oracle = oracle_of(step, tolerances.budget)
    truth = oracle.truth(slice(0, len(positions)))
    for edit in oracle.sight.edits:
        index, key = oracle.sight.index.clone(), edit.key[:, None]
        if edit.sign < 0:
            seen = (index == key) & (key >= 0)
            assert torch.equal(seen.sum(dim=1), (edit.key >= 0).long()), edit.name
            index[seen] = -1
        else:
            assert not bool(((index == key) & (key >= 0)).any()), edit.name
            index = torch.cat([index, key], dim=1)
        want, _ = dsv4_reference.attend(step.q, oracle.stored, index, step.sink, step.softmax_scale)
        torch.testing.assert_close(edited(oracle, truth, edit), want, rtol=0, atol=0, msg=edit.name)
    want, _ = dsv4_reference.attend(step.q, oracle.stored, oracle.sight.index, None, step.softmax_scale)
    torch.testing.assert_close(without_sink(oracle, truth), want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sink", ["off", "per-head"])
@pytest.mark.parametrize(
    ("ratio", "positions"), [(0, (0, 1, 126, 127, 128, 300)), (4, (2, 7, 40, 2100)), (128, (0, 127, 700))]
)
def test_an_effect_is_the_distance_over_the_budget(kit, tolerances, ratio, positions, sink):
    """Closed forms of effects against attention over the keys that are left."""
    step = kit.step("effects", ratio, positions, sink=sink)
    oracle = oracle_of(step, tolerances.budget)
    truth = oracle.truth(slice(0, len(positions)))
    moved = [edited(oracle, truth, edit) for edit in oracle.sight.edits] + [without_sink(oracle, truth)]
    has_sink = torch.full((len(positions),), sink != "off")
    where = [edit.key >= 0 for edit in oracle.sight.edits] + [has_sink]
    for got, output, applied in zip(effects(oracle, truth), moved, where, strict=True):
        distance = (output - truth.out).abs()
        of_max = distance.amax(dim=-1) / truth.max_budget
        of_mean = distance.mean(dim=-1) / truth.mean_budget
        want = torch.where(applied, torch.maximum(of_max, of_mean).amax(dim=1), torch.inf)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=0)


def test_edits_name_the_keys_that_mistakes_touch(kit, tolerances):
    step = kit.step("which-keys", 128, (126, 127, 128, 300))
    sight = sight_of(step, dsv4_reference)
    everything = torch.cat([step.tokens, step.entries])

    def keys(name):
        """Request-local position (or entry) that the edit touches in each row, None where it does not apply."""
        edit = next(edit for edit in sight.edits if edit.name == name)
        bases = step.entry_base + len(step.tokens) if "entry" in name else step.token_base
        found = []
        for row, key in enumerate(edit.key.tolist()):
            same = (everything == sight.bank[key]).all(dim=1).nonzero()[:, 0] if key >= 0 else []
            found.append(int(same[0] - bases[row]) if len(same) == 1 else None)
        return found

    assert keys("newest token dropped") == [126, 127, 128, 300]
    assert keys("next token seen") == [127, 128, 129, 301]
    assert keys("oldest token dropped") == [0, None, None, None]
    assert keys("window 127") == [None, 0, 1, 173]
    assert keys("window 129") == [None, None, 0, 172]
    assert keys("oldest entry dropped") == [None, 0, 0, 0]
    assert keys("newest entry dropped") == [None, None, None, 1]
    assert keys("compressed entry early") == [0, 1, 1, 2]


def test_an_early_c4_entry_is_offered_even_if_the_indexer_did_not(kit):
    step = kit.step("offered", 4, (2, 3, 9))
    early = next(edit for edit in sight_of(step, dsv4_reference).edits if edit.kind is Kind.EARLY)
    assert bool((early.key >= 0).all())
    hostile = step.selection.clone()
    hostile[:, -1] = torch.tensor([0, 1, 2], dtype=torch.int32)  # ids of entries that are not complete yet
    assert kit.one(kit.replace(step, selection=hostile)).outcome == "passed"


@pytest.mark.parametrize(
    ("ratio", "positions", "sink", "kinds"),
    [
        (0, (126,), "off", {Kind.DROP, Kind.ADD}),
        (0, (127,), "off", {Kind.DROP, Kind.ADD, Kind.SHORT}),
        (0, (128,), "zero", {Kind.DROP, Kind.ADD, Kind.SHORT, Kind.LONG, Kind.SINK}),
        (4, (5,), "off", {Kind.DROP, Kind.ADD, Kind.EARLY}),
        (0, (), "zero", set()),
    ],
)
def test_applicable_kinds(kit, ratio, positions, sink, kinds):
    scenario = kit.scenario("kinds", kit.step("kinds", ratio, positions, sink=sink))
    assert applicable_kinds(scenario) == kinds


def test_perturbations_are_named_in_the_order_of_their_effects(kit, tolerances):
    oracle = oracle_of(kit.step("names", 4, (300,), sink="zero"), tolerances.budget)
    names = perturbation_names(oracle)
    assert len(names) == len(effects(oracle, oracle.truth(slice(0, 1))))
    assert names[-1] == (Kind.SINK, "sink left out")
    assert {kind for kind, _ in names} == set(Kind)


def test_budgets_follow_their_formula(kit, tolerances):
    step = kit.step("formula", 0, (200,))
    budget = dataclasses.replace(tolerances.budget, baseline_factor=0.0)
    oracle = oracle_of(step, budget)
    truth = oracle.truth(slice(0, 1))
    torch.testing.assert_close(truth.max_budget, 0.5 * 2**-7 * truth.out.abs().amax(dim=-1))
    torch.testing.assert_close(truth.mean_budget, 0.125 * 2**-7 * truth.out.abs().mean(dim=-1))
    larger = oracle_of(step, tolerances.budget).truth(slice(0, 1))
    torch.testing.assert_close(larger.max_budget - truth.max_budget, 2 * truth.baseline_max)
