"""The documented backend in plain PyTorch passes as it stands, and a kernel put in its place is judged."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dsv4_matrix.context import Context, Options
from dsv4_matrix.execution import Setup, execute
from dsv4_matrix.loading import load_backend

EXAMPLE = Path(__file__).parents[2] / "docs/examples/torch_backend.py"
#: The lengths of a backend's first attention over each list of so many rows: of a graph, those of its capture.
_FROZEN = "vars(self).setdefault('lengths', {}).setdefault((len(counts), len(q)), length.clone())"
#: Dense and sparse prefill, several pages and another page size, compressed entries of both ratios, graphs, sinks.
CASES = ["r0-eager-extend-within-window", "r0-eager-decode-several-pages", "r4-cg-decode-page-crossing",
         "r128-cg-decode-second-block", "r4-cg-decode-emissions"]  # fmt: skip


@pytest.fixture
def setup_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Setup]:
    """``setup_with((old, new), ...)``: the example with these replacements in its source."""

    def make(*changes: tuple[str, str]) -> Setup:
        source = EXAMPLE.read_text()
        for old, new in changes:
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        spec = importlib.util.spec_from_loader("torch_backend", loader=None)
        assert spec is not None
        example = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "torch_backend", example)
        exec(compile(source, str(EXAMPLE), "exec"), example.__dict__)
        context = Context(Options(None, None, None, None, None, False, EXAMPLE.parents[2], False))
        backend = load_backend("torch_backend:TorchBackend")
        return Setup(context.matrix, context.machine, backend, context.setup.reference)

    return make


@pytest.mark.parametrize("case_id", CASES)
def test_it_passes(setup_with: Callable[..., Setup], case_id: str) -> None:
    setup = setup_with()
    done = execute(next(case for case in setup.matrix.cases() if case.id == case_id), setup)
    assert done.result.outcome == "passed", done.message


@pytest.mark.parametrize(
    ("change", "agrees"),
    [
        (("torch.logaddexp(lse, attn_sink)", "lse"), "agrees   with: sink left out"),
        (
            ("column < length[:, None]", "column < length[:, None] - 1"),
            "both lists one key short, the window's oldest token",
        ),
        (("float() - 127", "float() - 126"), "agrees   with: elements 0 to 447 of all keys twice as large"),
        ((" * self.softmax_scale", ""), "agrees   with: no softmax scale"),
        (("* self.softmax_scale", "* 576**-0.5"), "agrees   with: softmax scale 1/sqrt(576)"),
        (("+ column[:7]]", "+ (column[:7] + 1) % 7]"), "agrees   with: each group of 64 under the scale of the next"),
        (("view(torch.bfloat16)", "view(torch.float16)"), "of all keys read as fp16 instead of bf16"),
        (
            ("            index, column", f"            length = {_FROZEN}\n            index, column"),
            "only the window's newest token and the list's first compressed entry seen, as under lengths kept",
        ),
    ],
)
def test_a_mistake_in_it_is_told(setup_with: Callable[..., Setup], change: tuple[str, str], agrees: str) -> None:
    setup = setup_with(change)
    done = execute(next(case for case in setup.matrix.cases() if case.id == "r4-cg-decode-emissions"), setup)
    assert done.result.outcome == "failed", done.message
    assert agrees in done.message


def test_a_row_without_keys_is_zero_beside_one_with(setup_with: Callable[..., Setup]) -> None:
    """No case has such a row (docs/guarantees.md), and `attend` owes it all the same."""
    attend = setup_with().backend.factory.original.attend
    cache = torch.full((2, 4 * 584), 0xFF, dtype=torch.uint8)
    cache[1] = 0
    index = torch.tensor([[[-1, 5]], [[-1, -1]], [[4, 5]]], dtype=torch.int32)
    q, sink = torch.ones(3, 1, 16, 512, dtype=torch.bfloat16), torch.zeros(16)
    length = torch.tensor([2, 2, 0], dtype=torch.int32)
    out, lse = attend(SimpleNamespace(softmax_scale=0.1), q, cache.view(2, 4, 1, 584), index, length, sink)
    assert out.shape == (3, 1, 16, 512)
    assert not out.any()
    assert lse[:, :, 0].tolist() == [[0.0] * 16, [torch.inf] * 16, [torch.inf] * 16]


def test_the_documentation_counts_its_lines() -> None:
    count = len(EXAMPLE.read_text().splitlines())
    assert f"{count} lines" in (EXAMPLE.parents[1] / "backends.md").read_text()
