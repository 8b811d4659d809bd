"""The fp64 oracle against a loop over keys, and the low-precision form against the oracle."""

import ast
import math
import sys
from pathlib import Path

import dsv4_reference
import dsv4_reference.attention
import pytest
import torch

SCALE = 512**-0.5


def inputs(rows=5, heads=3, keys=70, bank_rows=90, seed=11, missing=0.3):
    generator = torch.Generator().manual_seed(seed)
    q = (2 * torch.randn(rows, heads, 512, generator=generator)).bfloat16()
    bank = dsv4_reference.quantise_dequantise(torch.randn(bank_rows, 512, generator=generator).bfloat16())
    index = torch.randint(0, bank_rows, (rows, keys), generator=generator)
    index[torch.rand(rows, keys, generator=generator) < missing] = -1
    return q, bank, index, torch.tensor([0.5, -1.0, 3.0])[:heads]


def by_loop(q, bank, index, sink, scale):
    """Row by row and head by head in Python floats and fsum."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], math.inf, dtype=torch.float64)
    for row in range(q.shape[0]):
        keys = [bank[i].double() for i in index[row].tolist() if i >= 0]
        for head in range(q.shape[1] if keys else 0):
            query = q[row, head].double()
            weights = [math.exp(scale * math.fsum((query * key).tolist())) for key in keys]
            below = math.fsum(weights) + (math.exp(float(sink[head])) if sink is not None else 0.0)
            out[row, head] = sum(w * key for w, key in zip(weights, keys, strict=True)) / below
            lse[row, head] = math.log(math.fsum(weights))
    return out, lse


@pytest.mark.parametrize("with_sink", [False, True])
def test_agrees_with_a_loop_over_keys(with_sink):
    q, bank, index, sink = inputs()
    index[2] = -1
    sink = sink if with_sink else None
    out, lse = dsv4_reference.attend(q, bank, index, sink, SCALE)
    want, want_lse = by_loop(q, bank, index, sink, SCALE)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("attend", [dsv4_reference.attend, dsv4_reference.attend_low_precision])
class TestBothForms:
    @pytest.mark.parametrize("sink", [None, 0.0, math.inf, -math.inf, 1e30, -1e30])
    def test_a_row_without_keys_is_zero_with_lse_inf(self, attend, sink):
        q, bank, index, _ = inputs()
        index[1] = -1
        sinks = None if sink is None else torch.full((3,), sink)
        out, lse = attend(q, bank, index, sinks, SCALE)
        assert bool((out[1] == 0).all())
        assert lse[1].tolist() == [math.inf] * 3
        assert bool(out.isfinite().all())
        assert bool(lse[[0, 2, 3, 4]].isfinite().all())

    def test_no_keys_at_all_and_no_rows(self, attend):
        q, bank, _, sink = inputs()
        for some_bank in (bank, bank[:0]):
            for index in (torch.full((5, 4), -1), torch.full((5, 0), -1)):
                out, lse = attend(q, some_bank, index, sink, SCALE)
                assert bool((out == 0).all())
                assert bool((lse == math.inf).all())
        assert attend(q[:0], bank, torch.zeros(0, 9).long(), sink, SCALE)[0].shape == (0, 3, 512)

    def test_sink_minus_inf_and_very_low_are_none_and_plus_inf_is_zero(self, attend):
        q, bank, index, _ = inputs()
        plain, lse = attend(q, bank, index, None, SCALE)
        for low in (-math.inf, -1e30):
            assert torch.equal(attend(q, bank, index, torch.full((3,), low), SCALE)[0], plain)
        for high in (math.inf, 1e30):
            out, high_lse = attend(q, bank, index, torch.full((3,), high), SCALE)
            assert bool((out == 0).all())
            assert torch.equal(high_lse, lse)

    def test_poison_that_no_row_names_does_not_leak(self, attend):
        q, bank, index, sink = inputs()
        index[index == 7] = -1
        clean = attend(q, bank, index, sink, SCALE)
        poisoned = bank.clone()
        poisoned[7] = math.nan
        poisoned[0] = bank[0]
        for got, want in zip(attend(q, poisoned, index, sink, SCALE), clean, strict=True):
            assert torch.equal(got, want)
        # Absent ids are clamped to row 0 for the gather: row 0 may hold NaN just as well.
        index[index == 0] = -1
        poisoned[0] = math.nan
        assert bool(attend(q, poisoned, index, sink, SCALE)[0].isfinite().all())

    def test_a_nan_key_that_is_seen_is_seen(self, attend):
        q, bank, index, sink = inputs(missing=0.0)
        index[index == 7] = 8
        index[3, 0] = 7
        bank[7, 100] = math.nan
        out, lse = attend(q, bank, index, sink, SCALE)
        assert out.isnan().flatten(1).all(dim=1).tolist() == [False, False, False, True, False]
        assert lse.isnan().all(dim=1).tolist() == [False, False, False, True, False]

    def test_zero_queries_give_the_mean_of_the_keys(self, attend):
        q, bank, index, _ = inputs(missing=0.0)
        out, lse = attend(torch.zeros_like(q), bank, index, None, SCALE)
        want = bank[index].mean(dim=1)[:, None].expand_as(out)
        torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=1e-12)
        torch.testing.assert_close(lse.double(), torch.full_like(lse, math.log(70)).double(), rtol=1e-6, atol=0)

    def test_rows_do_not_depend_on_how_they_are_chunked(self, attend, monkeypatch):
        q, bank, index, sink = inputs(rows=9)
        whole = attend(q, bank, index, sink, SCALE)
        monkeypatch.setattr(dsv4_reference.attention, "_CHUNK_BYTES", 1)
        for got, want in zip(attend(q, bank, index, sink, SCALE), whole, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)

    def test_extreme_scores_neither_overflow_nor_vanish(self, attend):
        q, bank, index, sink = inputs(missing=0.0)
        out, lse = attend((q.float() * 500).bfloat16(), bank, index, sink, SCALE)
        assert bool(out.isfinite().all())
        assert bool(lse.isfinite().all())
        assert float(out.abs().max()) <= float(bank.abs().max())


def test_low_precision_is_close_but_not_exact():
    q, bank, index, sink = inputs(rows=16)
    truth, lse = dsv4_reference.attend(q, bank, index, sink, SCALE)
    low, low_lse = dsv4_reference.attend_low_precision(q, bank, index, sink, SCALE)
    assert (low.dtype, low_lse.dtype) == (torch.bfloat16, torch.float32)
    error = (low.double() - truth).abs().amax(dim=-1) / truth.abs().amax(dim=-1)
    assert float(error.min()) > 2.0**-11
    assert float(error.max()) < 2.0**-7
    torch.testing.assert_close(low_lse.double(), lse, rtol=1e-5, atol=1e-5)


def test_the_reference_imports_numpy_and_torch_only():
    allowed = {*sys.stdlib_module_names, "numpy", "torch", "dsv4_reference"}
    for path in Path(dsv4_reference.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert {name.name.split(".")[0] for name in node.names} <= allowed, path.name
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] in allowed, path.name


def test_the_module_satisfies_the_protocol():
    from dsv4_matrix.protocol import Reference

    methods = {name for name in vars(Reference) if not name.startswith("_")}
    assert methods <= set(dir(dsv4_reference))
