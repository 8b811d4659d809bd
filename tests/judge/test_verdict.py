"""What a verdict rests on: every step observed, bounded memory, the same margin anywhere."""

import dataclasses
import math

import dsv4_reference
import pytest
import torch

from dsv4_matrix.declaration.model import Case, Tolerance
from dsv4_matrix.judge import judge, truth


def test_margins_do_not_depend_on_threads(kit):
    step = kit.step("threads", 4, (700, 900, 2300), heads=64, sink="per-head")
    answer = kit.kernel(step)
    before = torch.get_num_threads()
    verdicts = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            verdicts.append(kit.one(step, answer))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert verdicts[0] == verdicts[1]
    assert verdicts[0].outcome == "passed"


def test_margins_do_not_depend_on_how_rows_are_chunked(kit, monkeypatch):
    step = kit.step("chunks", 128, (5, 127, 128, 300, 700), sink="per-head")
    right, wrong = kit.kernel(step), kit.kernel(step, window=127)
    monkeypatch.setitem(truth._CHUNK_BYTES, "cpu", 1 << 30)
    whole = [kit.one(step, right), kit.one(step, wrong)]
    monkeypatch.setitem(truth._CHUNK_BYTES, "cpu", 2 * 8 * 16 * 512)
    parts = [kit.one(step, right), kit.one(step, wrong)]
    for one, other in zip(whole, parts, strict=True):
        assert one.outcome == other.outcome
        assert one.margin == pytest.approx(other.margin, rel=1e-6)
        assert one.weakest == pytest.approx(other.weakest, rel=1e-6)
    assert "window 127 (rows 1, 2, 3, 4" in parts[1].message


def test_a_step_that_nobody_observed_fails(kit):
    step = kit.step("unseen", 0, (5,))
    verdict = kit.verdict(kit.scenario("unseen", step, step), kit.observe(kit.kernel(step)))
    assert (verdict.outcome, verdict.margin) == ("failed", math.inf)
    assert "no answer was observed for steps [1]" in verdict.message
    assert kit.verdict(kit.scenario("unseen", step)).outcome == "failed"


def test_what_was_found_is_the_message_without_the_case_around_it(kit):
    """For a screen that names the case itself, such as that of a graph that could not be captured."""
    step = kit.step("finding", 4, (5,))
    flat = kit.step("flat-finding", 4, (4200,), topk=1024, style="zero")
    out, lse = kit.kernel(step)
    verdicts = [
        kit.verdict(kit.scenario("a-case", step)),
        kit.one(step, (out, lse.double())),
        kit.one(step, (out + 1, lse)),
        kit.one(flat),
    ]
    for verdict in verdicts:
        head, seed, run = (verdict.message.splitlines()[at] for at in (0, -2, -1))
        assert verdict.message == f"a-case: {verdict.outcome} on under-test (cpu), {verdict.finding}\n{seed}\n{run}"
        assert head.endswith(verdict.finding.splitlines()[0])
        assert "a-case" not in verdict.finding
    assert [verdict.outcome for verdict in verdicts] == ["failed", "failed", "failed", "insensitive"]
    assert kit.one(step).finding == ""


def test_an_idle_step_passes_with_empty_answers(kit):
    idle, busy = kit.step("idle", 4, ()), kit.step("busy", 4, (70,))
    nothing = (torch.zeros(0, 16, 512).bfloat16(), torch.zeros(0, 16))
    verdict = kit.verdict(kit.scenario("idle", idle, busy), kit.observe(nothing), kit.observe(kit.kernel(busy), 1))
    assert verdict.outcome == "passed", verdict.message
    assert kit.verdict(kit.scenario("idle", idle), kit.observe(nothing)).weakest == {}


def test_failed_comes_before_insensitive(kit):
    step = kit.step("both", 4, (4200,), topk=1024, style="zero")
    out, lse = kit.kernel(step)
    assert kit.one(step, (out, lse)).outcome == "insensitive"
    out[0, 0, 0] += 1
    assert kit.one(step, (out, lse)).outcome == "failed"


def test_the_contract_of_graph_replays_is_the_wider_one(kit, tolerances):
    """Tight budgets widened out of the way, an error between both contracts shows which one is applied."""
    step = kit.step("contract", 0, (40,))
    out, lse = kit.kernel(step)
    wide = dataclasses.replace(
        tolerances,
        budget=dataclasses.replace(tolerances.budget, rounding=1e6, mean_rounding=1e6, cosine=2.0),
        graph=Tolerance(0.4, 0.1),
    )
    out[0, 3, 9] += 0.3

    def outcome(graph):
        return judge(
            Case(id="contract", kind="case"),
            kit.scenario("contract", step),
            [kit.observe((out, lse), graph=graph)],
            dsv4_reference,
            wide,
            backend_name="b",
            device="cpu",
        )

    # The widened budget hides every perturbation: not failed is what counts here.
    assert outcome(graph=True).outcome == "insensitive"
    failed = outcome(graph=False)
    assert failed.outcome == "failed"
    assert "head 3, element 9" in failed.message
    assert "= 0.05 + 0.05 x |want|" in failed.message
    assert "unquantised K" in failed.message


def test_keys_too_large_for_the_contract_are_said_to_be(kit):
    step = kit.step("large-keys", 0, (1, 1, 1), heads=64)
    step = kit.replace(step, tokens=(step.tokens.float() * 8).bfloat16(), q=(step.q.float() / 8).bfloat16())
    verdict = kit.one(step)
    assert verdict.outcome == "failed"
    assert verdict.margin > 1
    assert "quantisation alone leaves the contract" in verdict.message


def test_strided_answers_and_long_queries_are_read_as_they_are(kit):
    step = kit.step("strided", 0, (3, 140))
    out, lse = kit.kernel(step)
    wide = torch.full((2, 16, 1024), math.nan).bfloat16()
    wide[..., ::2] = out
    assert kit.one(step, (wide[..., ::2], lse.T.contiguous().T)).outcome == "passed"


def test_callers_mistakes_raise(kit, tolerances):
    step = kit.step("mistakes", 0, (3,))
    scenario, answer = kit.scenario("mistakes", step), kit.kernel(step)
    with pytest.raises(ValueError, match="'mistakes' is not of case 'another'"):
        judge(Case(id="another", kind="case"), scenario, [], dsv4_reference, tolerances, backend_name="b", device="cpu")
    with pytest.raises(ValueError, match=r"leg 'eager' names step 1, the scenario has 1"):
        kit.verdict(scenario, kit.observe(answer, 1))
