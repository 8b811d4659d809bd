"""A kernel of one's own in place of ``attend`` or ``attend_prefill``: what it owes is told where it gives less."""

from __future__ import annotations

import pytest
from dsv4_triton import DSV4TritonBackend

from dsv4_matrix.context import Context, Options
from dsv4_matrix.execution import Setup, execute
from dsv4_matrix.loading import Backend, LoadError, load_backend

PAGED = "must return (out, lse), torch.bfloat16 [1, 1, 64, 512] and torch.float32 [1, 64, 1]; got "
#: What a call makes of its right answer, and what is said of it.
WRONG = {
    "nothing": (lambda out, lse: None, f"{PAGED}NoneType"),
    "out alone": (lambda out, lse: out, f"{PAGED}torch.bfloat16 [1, 1, 64, 512]"),
    "lse without its query": (
        lambda out, lse: (out, lse[..., 0]),
        f"{PAGED}torch.bfloat16 [1, 1, 64, 512], torch.float32 [1, 64]",
    ),
    "out without its query": (
        lambda out, lse: (out[:, 0], lse),
        f"{PAGED}torch.bfloat16 [1, 64, 512], torch.float32 [1, 64, 1]",
    ),
    "another dtype": (
        lambda out, lse: (out.float(), lse),
        f"{PAGED}torch.float32 [1, 1, 64, 512], torch.float32 [1, 64, 1]",
    ),
    "no lse": (lambda out, lse: (out, None), f"{PAGED}torch.bfloat16 [1, 1, 64, 512], NoneType"),
}


@pytest.fixture
def told():
    """``told(backend, case id)``: its outcome and message."""

    def run(factory, case_id):
        context = Context(Options.of_command())
        setup = Setup(context.matrix, context.machine, Backend("mine", factory), context.setup.reference)
        done = execute(next(case for case in setup.matrix.cases() if case.id == case_id), setup)
        return str(done.result.outcome), done.message

    return run


@pytest.mark.parametrize("wrong", WRONG)
def test_attend_is_told_what_it_owes(told, wrong):
    change, said = WRONG[wrong]

    class Mine(DSV4TritonBackend):
        def attend(self, *arguments):
            return change(*super().attend(*arguments))

    outcome, message = told(Mine, "r0-eager-decode-above-window")
    assert outcome == "error"
    assert f"Mine.attend {said}" in message


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda out, lse: None, "NoneType"),
        (lambda out, lse: (out, lse[..., None]), "torch.bfloat16 [1, 64, 512], torch.float32 [1, 64, 1]"),
    ],
)
def test_attend_prefill_is_told_what_it_owes(told, change, got):
    class Mine(DSV4TritonBackend):
        def attend_prefill(self, *arguments):
            return change(*super().attend_prefill(*arguments))

    outcome, message = told(Mine, "r0-eager-extend-page-below")
    assert outcome == "error"
    assert "Mine.attend_prefill must return (out, lse), torch.bfloat16 [" in message
    assert f"; got {got}\n" in message


def test_a_right_answer_passes(told):
    class Mine(DSV4TritonBackend):
        def attend(self, *arguments):
            return list(super().attend(*arguments))

    assert told(Mine, "r0-eager-decode-above-window")[0] == "passed"


ALL = "q, k_cache, indices, topk_length, attn_sink, extra_k_cache=None, extra_indices=None, extra_topk_length=None"


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        (f"block_table, {ALL}".replace("=None", ""), "missing a required argument: 'attn_sink'"),
        (ALL.replace("=None", ""), "missing a required argument: 'extra_k_cache'"),
        (ALL.rpartition(",")[0], "too many positional arguments"),
        ("q, k_cache, indices, topk_length", "too many positional arguments"),
    ],
)
def test_an_attend_that_cannot_be_called_is_told_where_it_is_defined(parameters, said):
    with pytest.raises(TypeError, match=rf"Mine\.attend\(self, .*\) is called as .*\(self, q, k_cache, .*\): {said}"):
        exec(f"class Mine(Base):\n    def attend(self, {parameters}): ...", {"Base": DSV4TritonBackend})


def test_an_attend_of_a_mixin_is_looked_at_too():
    class Mixin:
        def attend(self, q, k_cache, indices, topk_length): ...

    with pytest.raises(TypeError, match=r"Mine\.attend\(self, q, k_cache, indices, topk_length\) is called as "):

        class Mine(Mixin, DSV4TritonBackend): ...


@pytest.mark.parametrize("parameters", [ALL, "*arguments", f"{ALL}, more=None"])
def test_an_attend_that_can_be_called_is_taken(parameters):
    exec(f"class Mine(Base):\n    def attend(self, {parameters}): ...", {"Base": DSV4TritonBackend})


def test_the_loader_says_it(tmp_path, monkeypatch):
    head = "from dsv4_triton import DSV4TritonBackend\nclass Mine(DSV4TritonBackend):\n"
    (tmp_path / "own_attend.py").write_text(f"{head}    def attend(self, {ALL.replace('=None', '')}): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LoadError, match=r"module own_attend does not import: TypeError: Mine\.attend\(self, q, "):
        load_backend("own_attend:Mine", tmp_path)
