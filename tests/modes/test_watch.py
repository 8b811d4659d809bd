"""The watches: which inputs were written, and how many cache bytes changed."""

import torch

from dsv4_matrix.cases.build import build_scenario
from dsv4_matrix.modes.recorder import RecordedStep
from dsv4_matrix.modes.replay import check_capture
from dsv4_matrix.modes.step import StepInputs, entries_stored
from dsv4_matrix.modes.trace import Notebook
from dsv4_matrix.modes.watch import CacheWatch, InputWatch, same_bits


def test_every_input_is_watched(make_case, matrix):
    scenario = build_scenario(make_case(4, "eager", "extend", (3,), extend_lens=(5,), sink="zero"), matrix, "cpu")
    inputs = StepInputs.of(scenario.steps[0], scenario.placements[0])
    watch = InputWatch(scenario.runner, inputs)
    assert watch.written() == []
    handed = (inputs.q, inputs.k, inputs.sink, inputs.compressed, inputs.selection, inputs.batch.seq_lens)
    for tensor in (*handed, scenario.runner.req_to_token, scenario.runner.full_to_swa_index_mapping):
        tensor.view(-1)[0:1].add_(1)
    assert set(watch.written()) == {
        "q",
        "k",
        "sink",
        "compressed",
        "selection",
        "batch.seq_lens",
        "req_to_token",
        "full_to_swa_index_mapping",
    }


def test_a_payload_of_nan_is_a_change(make_case, matrix):
    scenario = build_scenario(make_case(4, "eager", "extend", (3,), extend_lens=(2,), heads=16), matrix, "cpu")
    inputs = StepInputs.of(scenario.steps[0], scenario.placements[0])
    watch = InputWatch(scenario.runner, inputs)
    inputs.compressed.view(torch.int16)[1, 0] ^= 1
    assert watch.written() == ["compressed"]


def test_changed_bytes_are_counted_and_the_dummy_page_apart():
    pools = {"swa": torch.full((3, 10), 255, dtype=torch.uint8), "c4": torch.zeros((2, 4), dtype=torch.uint8)}
    watch = CacheWatch(pools)
    assert watch.changed() == (0, 0)
    pools["swa"][1, 3:6] = 0
    pools["c4"][0, 1] = 7
    assert watch.changed() == (4, 1)


def test_entries_stored_are_tokens_and_completed_entries(make_case, matrix):
    def stored(ratio, mode, forward, prefixes, **variant):
        case = make_case(ratio, mode, forward, prefixes, heads=16, **variant)
        return entries_stored(build_scenario(case, matrix, "cpu").steps[0])

    assert stored(0, "eager", "extend", (3,), extend_lens=(9,)) == 9
    assert stored(4, "eager", "extend", (3,), extend_lens=(9,)) == 9 + 3
    assert stored(128, "eager", "decode", (127, 128)) == 2 + 1


def test_bits_tell_zeros_and_nans_apart():
    one = torch.tensor([[0.0], [float("nan")], [1.0]])
    other = torch.tensor([[-0.0], [float("nan")], [1.0]])
    assert same_bits(one, other).tolist() == [False, True, True]


def test_a_graph_that_holds_nothing_is_a_violation():
    out, lse = torch.zeros(2, 16, 512, dtype=torch.bfloat16), torch.zeros(2, 16)
    notebook = Notebook()
    check_capture(notebook, RecordedStep(lambda: ((out, lse),)), [out.shape])
    assert notebook.violations == ["capture: the graph holds nothing; the step ran outside of it"]
