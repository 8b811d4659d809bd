"""What driving a case reports: legs, captures, replays, and the cases it will not drive."""

from dataclasses import replace

import pytest
import torch

from dsv4_matrix.cases.build import build_scenario
from dsv4_matrix.modes.drive import drive
from dsv4_matrix.modes.trace import LegEnded, Notebook


def test_extend_runs_both_prefill_paths(toy, make_case, trace_of):
    seen = []

    class Noting(toy.ToyBackend):
        def __init__(self, runner, pools=None):
            seen.append(runner.prefill_path)
            super().__init__(runner, pools)

    trace = trace_of(make_case(4, "eager", "extend", (3,), extend_lens=(5,), heads=16), Noting)
    assert seen == ["dense", "sparse"]
    assert [observation.leg for observation in trace.observations] == ["dense", "sparse"]
    assert (trace.captures, trace.replays) == (0, 0)


def test_a_graph_case_of_one_batch_still_replays_three_times(toy, make_case, trace_of):
    trace = trace_of(make_case(0, "cg-decode", "decode", (9,), heads=16), toy.ToyBackend)
    assert (trace.captures, trace.replays, trace.violations) == (1, 3, ())
    assert [(observation.step, observation.graph) for observation in trace.observations] == [(0, True)]


def test_idle_steps_are_replayed_and_observed_without_rows(toy, make_case, trace_of):
    trace = trace_of(make_case(128, "cg-decode", "decode", (9,), heads=16, replays=((), (130,))), toy.ToyBackend)
    assert trace.replays == 4
    assert [tuple(observation.out.shape) for observation in trace.observations] == [
        (1, 16, 512),
        (0, 16, 512),
        (1, 16, 512),
    ]


def test_the_step_behind_a_verify_runs_eagerly_between_replays(toy, make_case, trace_of):
    case = make_case(
        0, "verify-cg", "target-verify", (9,), extend_lens=(3,), accept_lens=(2,), heads=16, replays=((4,),)
    )
    trace = trace_of(case, toy.ToyBackend)
    assert [(observation.step, observation.graph) for observation in trace.observations] == [
        (0, True),
        (1, False),
        (2, True),
    ]


def test_a_chain_is_observed_eagerly_and_captured(toy, make_case, trace_of):
    trace = trace_of(make_case(0, "eagle-draft-runner", "decode", (9, 4), num_steps=3, heads=16), toy.ToyBackend)
    assert (trace.captures, trace.replays, trace.violations) == (1, 3, ())
    assert [(observation.step, observation.graph) for observation in trace.observations] == [
        (0, False),
        (1, False),
        (0, True),
        (1, True),
    ]


def test_capture_never_sees_the_case(toy, make_case, trace_of):
    lengths = []

    class Noting(toy.ToyBackend):
        def init_forward_metadata_out_graph(self, batch, *, in_capture=False):
            lengths.append((in_capture, batch.seq_lens.tolist(), list(batch.seq_lens_cpu)))
            super().init_forward_metadata_out_graph(batch, in_capture=in_capture)

    trace_of(make_case(0, "cg-decode", "decode", (9, 5), bucket=3, heads=16), Noting)
    assert lengths[0] == (True, [1, 1, 1], [1, 1, 1])
    assert lengths[1] == (False, [10, 6, 1], [10, 6, 1])


def test_draft_extend_pads_have_lengths_below_their_rows(toy, make_case, trace_of):
    seen = []

    class Noting(toy.ToyBackend):
        def init_forward_metadata_out_graph(self, batch, *, in_capture=False):
            seen.append((batch.seq_lens.tolist(), batch.extend_seq_lens.tolist()))
            super().init_forward_metadata_out_graph(batch, in_capture=in_capture)

    case = make_case(0, "de-cg", "draft-extend", (9,), extend_lens=(4,), bucket=2, heads=16)
    assert not trace_of(case, Noting).violations
    assert seen[1] == ([13, 1], [4, 4])


def test_a_column_without_a_driver_is_an_error(toy, make_case, matrix):
    case = make_case(0, "eager", "decode", (9,), heads=16)
    scenario = build_scenario(case, matrix, "cpu")
    with pytest.raises(ValueError, match="no driver"):
        drive(replace(case, cell=replace(case.cell, mode="pcg-extend")), scenario, toy.ToyBackend, "cpu")
    with pytest.raises(ValueError, match="driven on 'cuda'"):
        drive(case, scenario, toy.ToyBackend, "cuda")
    probe = next(case for case in matrix.cases() if case.kind == "probe")
    with pytest.raises(ValueError, match="is not driven"):
        drive(probe, scenario, toy.ToyBackend, "cpu")


def test_outputs_are_not_the_reference_by_accident_of_memory(toy, make_case, trace_of):
    class Lazy(toy.ToyBackend):
        def _attend(self, q, batch, compress_ratio, attn_sink):
            return torch.empty_like(q), torch.empty(q.shape[:2])

    trace = trace_of(make_case(0, "cg-decode", "decode", (9,), heads=16), Lazy)
    assert trace.observations[0].out.isnan().all()


def test_a_backend_may_answer_from_a_workspace(toy, make_case, outcome_of):
    class Workspace(toy.ToyBackend):
        answers = torch.zeros(8, 16, 512, dtype=torch.bfloat16), torch.zeros(8, 16)

        def _attend(self, q, batch, compress_ratio, attn_sink):
            rows = q.shape[0]
            result = super()._attend(q, batch, compress_ratio, attn_sink)
            return tuple(held[:rows].copy_(part) for held, part in zip(self.answers, result, strict=True))

    for given in (
        (0, "verify-eager", "target-verify", (9, 130), {"extend_lens": (3, 3), "accept_lens": (1, 2)}),
        (0, "eagle-draft-runner", "decode", (32, 126), {"num_steps": 4}),
        (0, "cg-decode", "decode", (9, 130), {"replays": ((7,),)}),
    ):
        *case, variant = given
        assert outcome_of(make_case(*case, heads=16, **variant), Workspace) == "passed"


def test_a_sync_that_broke_a_capture_is_named_by_its_cause():
    notebook = Notebook()

    def broken_capture():
        try:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    with pytest.raises(LegEnded), notebook.backend_at_work("capture"):
        broken_capture()
    assert notebook.violations == ["capture: host sync: CUDA error: operation not permitted when stream is capturing"]


def test_a_sync_that_the_debug_mode_refused_is_a_violation():
    notebook = Notebook()
    with pytest.raises(LegEnded), notebook.backend_at_work("replay 0"):
        raise RuntimeError("called a synchronizing CUDA operation")
    assert notebook.violations == ["replay 0: host sync: called a synchronizing CUDA operation"]
