"""The tester tested: every defect that the toy backend can have is seen, and without one it passes the same cases."""

from pathlib import Path

import pytest

from dsv4_matrix.modes.errors import BackendError
from dsv4_matrix.modes.rig import small_runner
from dsv4_matrix.protocol import AttentionBackend, MultiStepDraftBackend

#: Small cases by name: (ratio, mode, forward, prefixes, variant).
CASES = {
    "decode": (0, "eager", "decode", (5, 200), {"sink": "per-head", "heads": 16}),
    "extend": (0, "eager", "extend", (126,), {"extend_lens": (6,), "heads": 16, "q_layout": "strided"}),
    "c4-decode": (4, "eager", "decode", (2070, 6), {"heads": 16, "history": "window"}),
    "c128-extend": (128, "eager", "extend", (125,), {"extend_lens": (6,), "heads": 16}),
    "c4-graph": (4, "cg-decode", "decode", (70, 9, 31), {"heads": 16, "replays": ((10,), (), (127, 80))}),
    "graph": (0, "cg-decode", "decode", (70, 9, 31), {"heads": 16, "bucket": 4, "replays": ((130,), (3, 126))}),
    "verify": (0, "verify-eager", "target-verify", (126, 9), {"extend_lens": (3, 3), "heads": 16}),
    "rollback": (
        4,
        "verify-eager",
        "target-verify",
        (253, 6),
        {"extend_lens": (6, 6), "accept_lens": (1, 2), "reuse": "freed", "heads": 16},
    ),
    "verify-graph": (
        4,
        "verify-cg",
        "target-verify",
        (6, 30),
        {"extend_lens": (4, 4), "accept_lens": (1, 3), "heads": 16, "replays": ((7,),)},
    ),
    "draft-extend": (0, "de-eager", "draft-extend", (64, 96), {"extend_lens": (1, 4), "heads": 16}),
    "draft-extend-graph": (0, "de-cg", "draft-extend", (64, 96), {"extend_lens": (4, 4), "heads": 16, "bucket": 3}),
    "draft-runner": (0, "eagle-draft-runner", "decode", (32, 126), {"num_steps": 4, "heads": 16, "bucket": 4}),
    "gpu-lengths": (0, "de-eager", "draft-extend", (9, 6), {"extend_lens": (2, 1), "heads": 16, "gpu_only_lens": True}),
}

#: Each defect, a case that must see it, and what it is seen by: the judge, or a part of a violation's sentence.
SEEN = {
    "window127": ("decode", "failed"),
    "window129": ("extend", "failed"),
    "window_in_future": ("verify", "failed"),
    "entry_early": ("c128-extend", "failed"),
    "entry_late": ("c4-decode", "failed"),
    "sink_dropped": ("decode", "failed"),
    "sink_of_next_head": ("decode", "failed"),
    "sink_in_lse": ("decode", "failed"),
    "lse_log2": ("decode", "failed"),
    "page_row_ignored": ("decode", "failed"),
    "identity_slot_map": ("decode", "failed"),
    "map_cached": ("rollback", "failed"),
    "rejected_entry_visible": ("verify-graph", "failed"),
    "rope_lost": ("decode", "failed"),
    "scale_of_neighbour": ("decode", "failed"),
    "first_key_clamped": ("decode", "failed"),
    "sparse_window127": ("extend", "failed"),
    "selection_ignored": ("c4-decode", "failed"),
    "selection_not_reset": ("c4-graph", "differs in bits from the same step's first replay"),
    "verify_rows_share_first_length": ("verify", "failed"),
    "extend_rows_from_prefix": ("draft-extend", "failed"),
    "draft_positions_not_advanced": ("draft-runner", "failed"),
    "draft_steps_share_slot": ("draft-runner", "failed"),
    "stale_graph_buffer": ("graph", "differs in bits from the eager run"),
    "stale_row_when_shrinking": ("graph", "cache bytes changed"),
    "length_frozen_in_graph": ("graph", "differs in bits from the eager run"),
    "pad_writes_live_slot": ("graph", "cache bytes changed"),
    "pad_leaks": ("graph", "differs in bits from the eager run"),
    "out_loc_cached_while_idle": ("graph", "the step stores no entry at all"),
    "host_sync_in_graph": ("verify-graph", "host sync: aten._local_scalar_dense"),
    "host_sync_swallowed": ("draft-extend-graph", "host sync: Tensor.tolist() at"),
    "attention_outside_graph": ("draft-extend-graph", "differs in bits from the eager run"),
    "input_written": ("decode", "wrote its inputs: q"),
    "table_written": ("draft-runner", "wrote its inputs: req_to_token"),
    "dummy_written": ("c128-extend", "bytes of the dummy page changed"),
    "q_stride_ignored": ("extend", "failed"),
    "page_table_cached": ("graph", "failed"),
    "wrong_dtype": ("decode", "out must be torch.bfloat16 [2, 16, 512], got torch.float32"),
    "wrong_shape": ("graph", "got torch.bfloat16 [4, 1, 16, 512]"),
    "lse_missing": ("draft-runner", "must return (out, lse)"),
    "nan_output": ("decode", "failed"),
}
#: Seen by probes, or as an error; see the tests of those.
ELSEWHERE = {"raises", "refuses_nothing", "refuses_wrongly", "dead_after_refusal"}


def made(make_case, name):
    ratio, mode, forward, prefixes, variant = CASES[name]
    return make_case(ratio, mode, forward, prefixes, **variant)


def test_the_toy_keeps_the_protocol(toy):
    runner = small_runner("cpu")
    assert isinstance(toy.ToyBackend(runner), AttentionBackend)
    assert isinstance(toy.ToyBackend.multi_step(runner, num_steps=3), MultiStepDraftBackend)


def test_every_defect_of_the_toy_has_a_test(toy):
    assert set(SEEN) | ELSEWHERE == set(toy.DEFECTS)


@pytest.mark.parametrize("name", CASES)
def test_the_sound_toy_passes(name, toy, make_case, outcome_of):
    assert outcome_of(made(make_case, name), toy.ToyBackend) == "passed"


@pytest.mark.parametrize("defect", SEEN)
def test_a_defect_is_seen(defect, toy, make_case, outcome_of):
    name, expected = SEEN[defect]
    outcome = outcome_of(made(make_case, name), toy.broken(defect))
    if expected == "failed":
        assert outcome == "failed"
    else:
        assert outcome.startswith("violated: ")
        assert expected in outcome


@pytest.mark.parametrize("name", ["decode", "graph", "c128-extend"])
def test_pools_that_are_kept_back_are_missed(name, toy, make_case, trace_of):
    """They would be neither poisoned nor watched."""

    class Hiding(toy.ToyBackend):
        def kv_buffers(self):
            return {}

    trace = trace_of(made(make_case, name), Hiding)
    assert any("no cache byte changed; kv_buffers must give all pools" in told for told in trace.violations)


@pytest.mark.parametrize("name", ["decode", "graph", "draft-runner"])
def test_a_backend_that_raises_is_an_error_with_its_place_and_frames(name, toy, make_case, trace_of):
    with pytest.raises(BackendError) as caught:
        trace_of(made(make_case, name), toy.broken("raises"))
    text = str(caught.value)
    assert "RuntimeError: the toy backend fails on purpose" in text
    assert "toy_backend/backend.py:" in text
    assert len(text.splitlines()) < 10
    # Messages end up in reports, which hold no machine's paths.
    assert str(Path(toy.__file__).parents[1]) not in text


def test_gpu_only_lengths_are_not_read_on_the_host(toy, make_case, outcome_of):
    class Reads(toy.ToyBackend):
        def init_forward_metadata(self, batch):
            batch.extend_seq_lens.tolist()
            super().init_forward_metadata(batch)

    assert "host sync: Tensor.tolist() at" in outcome_of(made(make_case, "gpu-lengths"), Reads)
    assert outcome_of(made(make_case, "draft-extend"), Reads) == "passed"


def test_a_chain_needs_one_backend_a_step(toy, make_case, trace_of):
    class Short(toy.ToyBackend):
        @classmethod
        def multi_step(cls, runner, *, num_steps, compress_ratio=0):
            return toy.ToyMultiStep(cls, runner, num_steps - 1)

    assert "4 steps need 3 attention backends, got 2" in trace_of(made(make_case, "draft-runner"), Short).violations[0]
