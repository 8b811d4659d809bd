"""On a GPU: real graphs pass the sound toy and show its graph defects. The recorded replay has the same tests."""

import pytest
import torch

from dsv4_matrix.cases.build import build_scenario
from dsv4_matrix.modes.capture import CudaGraphStep
from dsv4_matrix.modes.drive import drive
from dsv4_matrix.modes.errors import BackendError
from dsv4_matrix.modes.host_sync import no_host_sync

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CASES = {
    "graph": (0, "cg-decode", "decode", (70, 9, 31), {"heads": 16, "bucket": 4, "replays": ((130,), (), (3, 126))}),
    "c4-graph": (4, "cg-decode", "decode", (70, 9, 31), {"heads": 16, "replays": ((10,), (), (127, 80))}),
    "verify-graph": (
        4,
        "verify-cg",
        "target-verify",
        (6, 30),
        {"extend_lens": (4, 4), "accept_lens": (1, 3), "heads": 16, "replays": ((7,),)},
    ),
    "draft-extend-graph": (0, "de-cg", "draft-extend", (64, 96), {"extend_lens": (4, 4), "heads": 16, "bucket": 3}),
    "draft-runner": (0, "eagle-draft-runner", "decode", (32, 126), {"num_steps": 4, "heads": 16, "bucket": 4}),
    "gpu-lengths": (0, "cg-decode", "decode", (9, 6), {"heads": 16, "gpu_only_lens": True, "replays": ((7,),)}),
}


def run(make_case, matrix, name, factory):
    ratio, mode, forward, prefixes, variant = CASES[name]
    case = make_case(ratio, mode, forward, prefixes, **variant)
    return drive(case, build_scenario(case, matrix, "cuda"), factory, "cuda")


@pytest.mark.parametrize("name", CASES)
def test_the_sound_toy_is_captured_and_replayed(name, toy, make_case, matrix):
    trace = run(make_case, matrix, name, toy.ToyBackend)
    assert trace.violations == ()
    assert trace.captures == 1
    assert trace.replays >= 3


@pytest.mark.parametrize(
    "defect",
    [
        "stale_graph_buffer",
        "stale_row_when_shrinking",
        "length_frozen_in_graph",
        "pad_writes_live_slot",
        "pad_leaks",
        "out_loc_cached_while_idle",
    ],
)
def test_a_graph_defect_is_seen(defect, toy, make_case, matrix):
    assert run(make_case, matrix, "graph", toy.broken(defect)).violations


@pytest.mark.parametrize("defect", ["host_sync_in_graph", "host_sync_swallowed"])
def test_a_host_sync_ends_the_capture(defect, toy, make_case, matrix):
    def outcome():
        try:
            return " ".join(run(make_case, matrix, "graph", toy.broken(defect)).violations)
        except BackendError as error:
            return str(error)

    assert "captur" in outcome()


def test_a_sync_outside_of_a_graph_is_refused_on_demand():
    lens = torch.arange(4, device="cuda")
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"), no_host_sync("cuda"):
        lens.tolist()
    assert lens.tolist() == [0, 1, 2, 3]


def test_a_scenario_has_the_same_bytes_on_both_devices(make_case, matrix):
    case = make_case(4, "verify-eager", "target-verify", (254, 30), extend_lens=(5, 5), accept_lens=(1, 4), sink="zero")
    here, there = (build_scenario(case, matrix, device) for device in ("cpu", "cuda"))
    for one, other in zip(here.steps, there.steps, strict=True):
        for name in ("q", "k", "tokens", "entries", "selection"):
            assert torch.equal(getattr(one, name), getattr(other, name).cpu()), name


def test_a_graph_keeps_addresses():
    static = torch.ones(4, device="cuda")
    graph = CudaGraphStep(lambda: ((static * 2, static + 1),))
    static.fill_(5)
    graph.replay()
    assert graph.outputs[0][0].tolist() == [10.0] * 4
