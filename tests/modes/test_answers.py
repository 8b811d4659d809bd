"""What ``forward`` owes is told where it returns something else: the parts, their shapes, their dtypes."""

from __future__ import annotations

import pytest
import torch

from dsv4_matrix.modes.rig import Rig
from dsv4_matrix.modes.trace import Notebook, answer_faults

OWED = "forward must return (out, lse), a tuple of out torch.bfloat16 [3, 16, 512], lse torch.float32 [3, 16]; got "
OUT, LSE = torch.zeros(3, 16, 512).bfloat16(), torch.zeros(3, 16)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((OUT, LSE), []),
        (None, [f"{OWED}NoneType"]),
        (OUT, [f"{OWED}torch.bfloat16 [3, 16, 512]"]),
        ((OUT,), [f"{OWED}(torch.bfloat16 [3, 16, 512])"]),
        ((OUT, None), [f"{OWED}(torch.bfloat16 [3, 16, 512], NoneType)"]),
        ([OUT, LSE], [f"{OWED}list"]),
        ((OUT, LSE, LSE), [f"{OWED}(torch.bfloat16 [3, 16, 512], torch.float32 [3, 16], torch.float32 [3, 16])"]),
        ((OUT, LSE[..., None]), ["lse must be torch.float32 [3, 16], got torch.float32 [3, 16, 1]"]),
        ((OUT, LSE[0]), ["lse must be torch.float32 [3, 16], got torch.float32 [16]"]),
        ((OUT, LSE.double()), ["lse must be torch.float32 [3, 16], got torch.float64 [3, 16]"]),
        (
            (OUT[:, None], LSE.T),
            [
                "out must be torch.bfloat16 [3, 16, 512], got torch.bfloat16 [3, 1, 16, 512]",
                "lse must be torch.float32 [3, 16], got torch.float32 [16, 3]",
            ],
        ),
    ],
)
def test_each_wrong_answer_is_told(answer, told):
    assert answer_faults(answer, 3, 16, 512) == told


#: What a backend makes of its right answer, and what is said of it.
WRONG = {
    "nothing": (lambda out, lse: None, "got NoneType"),
    "out alone": (lambda out, lse: out, "forward must return (out, lse)"),
    "lse with a dimension for the query": (lambda out, lse: (out, lse[..., None]), "lse must be torch.float32 ["),
}


def answering(toy, change):
    class Backend(toy.ToyBackend):
        def forward(self, q, batch, compress_ratio, attn_sink):
            return change(*super().forward(q, batch, compress_ratio, attn_sink))

    return Backend


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("mode", ["eager", "cg-decode", "eagle-draft-runner"])
def test_every_mode_tells_it(toy, make_case, trace_of, mode, wrong):
    change, told = WRONG[wrong]
    steps = {"num_steps": 3} if mode == "eagle-draft-runner" else {}
    trace = trace_of(make_case(0, mode, "decode", (5, 9), heads=16, **steps), answering(toy, change))
    assert trace.observations == ()
    assert told in trace.violations[0]
    faults = [sentence.partition(": ")[2] for sentence in trace.violations]
    assert len(faults) == len(set(faults))


def test_the_same_of_later_steps_is_told_once(toy, make_case, trace_of):
    change, _ = WRONG["nothing"]
    steps = trace_of(
        make_case(0, "eagle-draft-runner", "decode", (5, 9), heads=16, num_steps=5), answering(toy, change)
    )
    assert len(steps.violations) == 1


def test_another_fault_of_a_later_step_is_told_too():
    notebook = Notebook()
    for place, answer in (("step 0", (OUT, None)), ("step 1", (OUT, LSE.T)), ("step 2", (OUT, None))):
        assert not notebook.check_answer(place, answer, 3, 16, 512)
    assert [sentence.partition(":")[0] for sentence in notebook.violations] == ["step 0", "step 1"]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_probe_tells_it_of_the_decode_behind_a_refusal(toy, wrong):
    change, told = WRONG[wrong]
    backend = answering(toy, change)
    rig = Rig(backend, "cpu", 0)
    assert told in rig.serve(rig.backend)
    assert Rig(toy.ToyBackend, "cpu", 0).serve(toy.ToyBackend(rig.runner)) == ""
