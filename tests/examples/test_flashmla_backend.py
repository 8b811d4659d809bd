"""The documented 20-line backend works over any function of FlashMLA's shape, and is judged like every other."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dsv4_triton
import pytest
import torch

from dsv4_matrix.context import Context, Options
from dsv4_matrix.execution import Setup, execute
from dsv4_matrix.loading import load_backend

EXAMPLE = Path(__file__).parents[2] / "docs/examples/flashmla_backend.py"
CASES = ["r0-eager-decode-multi-request", "r4-eager-decode", "r128-cg-decode-second-block"]


def checked(sink: Callable[[torch.Tensor], torch.Tensor | None], seen: list[str]) -> Callable[..., Any]:
    """A stand-in for FlashMLA's function: insists on its shapes and dtypes, then computes with ``sink(attn_sink)``."""

    def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, scheduler, **rest):  # type: ignore[no-untyped-def]
        rows, width = rest["indices"].shape[0], rest["indices"].shape[2]
        assert (block_table, cache_seqlens, head_dim_v) == (None, None, 512)
        assert q.shape[:2] == (rows, 1)
        assert q.dtype == torch.bfloat16
        assert k_cache.shape[2:] == (1, 584)
        assert rest["indices"].shape == (rows, 1, width)
        assert rest["indices"].dtype == torch.int32
        assert rest["topk_length"].shape == (rows,)
        assert (rest["extra_k_cache"] is None) == (rest["extra_indices_in_kvcache"] is None)
        seen.append("extra" if rest["extra_k_cache"] is not None else "plain")
        rest["attn_sink"] = sink(rest["attn_sink"])
        return dsv4_triton.flash_mla_with_kvcache(q, k_cache, None, None, head_dim_v, scheduler, **rest)

    return flash_mla_with_kvcache


@pytest.fixture
def setup_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Setup]:
    """``setup_with(function)``: the example loaded over a module ``flash_mla`` that holds ``function``."""

    def make(function: Callable[..., Any]) -> Setup:
        flash_mla = types.ModuleType("flash_mla")
        flash_mla.flash_mla_with_kvcache = function  # type: ignore[attr-defined]
        flash_mla.get_mla_metadata = dsv4_triton.get_mla_metadata  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flash_mla", flash_mla)
        spec = importlib.util.spec_from_file_location("flashmla_backend", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        example = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "flashmla_backend", example)
        spec.loader.exec_module(example)
        context = Context(Options(None, None, None, None, None, False, EXAMPLE.parents[2], False))
        backend = load_backend("flashmla_backend:FlashMLABackend")
        return Setup(context.matrix, context.machine, backend, context.setup.reference)

    return make


@pytest.mark.parametrize("case_id", CASES)
def test_it_passes_over_a_right_function(setup_with: Callable[..., Setup], case_id: str) -> None:
    seen: list[str] = []
    setup = setup_with(checked(lambda sink: sink, seen))
    done = execute(next(case for case in setup.matrix.cases() if case.id == case_id), setup)
    assert done.result.outcome == "passed", done.message
    assert set(seen) == {"plain" if case_id.startswith("r0") else "extra"}


def test_it_fails_over_a_wrong_one(setup_with: Callable[..., Setup]) -> None:
    setup = setup_with(checked(lambda sink: None, []))
    case = next(case for case in setup.matrix.cases() if case.variant and case.variant.sink == "per-head")
    done = execute(case, setup)
    assert done.result.outcome == "failed", done.message
    assert case.id in done.message


def test_a_host_sync_is_told_once_with_one_headline_seed_and_command(setup_with: Callable[..., Setup]) -> None:
    def reads(sink: torch.Tensor) -> torch.Tensor:
        return sink * (sink.max().item() != 0)

    setup = setup_with(checked(reads, []))
    case = next(case for case in setup.matrix.cases() if case.id == "r4-cg-decode-within-window")
    done = execute(case, setup)
    assert done.result.outcome == "failed", done.message
    lines = done.message.splitlines()
    assert lines[1].startswith("  capture: host sync: aten._local_scalar_dense")
    assert [line.split()[0] for line in lines[-2:]] == ["seed", "run"]
    assert sum(line.split()[0] in ("seed", "run") for line in lines) == 2
    assert lines[0].startswith("r4-cg-decode-within-window: failed on ")
    assert sum("failed on" in line for line in lines) == 1
    assert lines[2].startswith("  no answer was observed for steps [0,")


def test_it_is_as_short_as_the_documentation_says() -> None:
    source = EXAMPLE.read_text().splitlines()
    assert len(source[source.index("class FlashMLABackend(DSV4TritonBackend):") :]) <= 20
    assert inspect.cleandoc(EXAMPLE.read_text()) in inspect.cleandoc((EXAMPLE.parents[1] / "backends.md").read_text())
