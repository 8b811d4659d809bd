"""The logical half: which rows run when, and what each forward mode calls a length."""

import pytest
import torch

from dsv4_matrix.cases.build import build_scenario


def batch_of(scenario, step=0):
    return scenario.placements[step].batch


def test_decode_counts_the_new_token(make):
    batch = batch_of(make(0, "eager", "decode", (64, 0)))
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu == [65, 1]
    assert batch.positions.tolist() == [64, 0]
    assert batch.extend_seq_lens is None


def test_extend_and_draft_extend_count_prefix_and_rows(make):
    for mode, forward in (("eager", "extend"), ("de-eager", "draft-extend")):
        batch = batch_of(make(0, mode, forward, (5, 9), extend_lens=(3, 2)))
        assert batch.seq_lens.tolist() == [8, 11]
        assert batch.extend_seq_lens.tolist() == batch.extend_seq_lens_cpu == [3, 2]
        assert batch.positions.tolist() == [5, 6, 7, 9, 10]


def test_verify_does_not_count_drafts(make):
    uniform = batch_of(make(0, "verify-eager", "target-verify", (5, 9), extend_lens=(3, 3)))
    assert uniform.seq_lens.tolist() == [5, 9]
    assert uniform.draft_token_num == 3
    assert uniform.verify_lens is None
    ragged = batch_of(make(0, "verify-eager", "target-verify", (5, 9), extend_lens=(3, 2)))
    assert ragged.verify_lens.tolist() == [3, 2]


def test_gpu_only_lengths_have_no_host_copy(make):
    batch = batch_of(make(0, "de-eager", "draft-extend", (5,), extend_lens=(3,), gpu_only_lens=True))
    assert batch.seq_lens_cpu is None
    assert batch.extend_seq_lens_cpu is None


def test_draft_steps_are_serial_decodes(make):
    scenario = make(0, "eagle-draft-runner", "decode", (32, 64), num_steps=4)
    assert [step.positions.tolist() for step in scenario.steps] == [[32, 64], [33, 65], [34, 66]]
    for earlier, later in zip(scenario.steps, scenario.steps[1:], strict=False):
        # What one step stores is history of the next.
        rows = later.token_base[:-1] + earlier.positions
        assert torch.equal(later.tokens[rows], earlier.k)
    assert [placement.history_loc.numel() for placement in scenario.placements] == [96, 0, 0]


def test_replays_repeat_extend_lens(make):
    scenario = make(0, "verify-cg", "target-verify", (5,), extend_lens=(4,), replays=((6, 7),))
    assert scenario.steps[1].row_counts == (4, 4)


def test_extend_without_rows_is_refused(make):
    with pytest.raises(ValueError, match="needs extend_lens"):
        make(0, "eager", "extend", (5,))


def test_an_unknown_forward_is_refused(make):
    with pytest.raises(ValueError, match="target-verify"):
        make(0, "eager", "verify", (5,))


def test_a_probe_has_no_scenario(matrix):
    probe = next(case for case in matrix.cases() if case.kind == "probe")
    with pytest.raises(ValueError, match="has no scenario"):
        build_scenario(probe, matrix, "cpu")
