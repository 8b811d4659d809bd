"""Whether a prefill has the bits of single decodes over the same cache bytes: as matrix.yaml declares, path by path.

Outputs, log-sum-exps, and log-probabilities of a fixed projection are compared. A path that is declared to differ must
do so, and not below its declared length, so that the declaration cannot go stale in either direction.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from dsv4_reference.logprobs import log_softmax_bits
from dsv4_triton import DSV4TritonBackend, attention, flash_mla
from dsv4_triton.logprobs import log_softmax

from dsv4_matrix.cases.batch import plan_steps
from dsv4_matrix.cases.build import assemble
from dsv4_matrix.cases.poison import poison_pools
from dsv4_matrix.cases.queries import FINE
from dsv4_matrix.declaration import Case, Variant, find_matrix, load_matrix
from dsv4_matrix.judge.bits import bit_equal
from dsv4_matrix.modes.step import StepInputs, run_eager_step
from dsv4_matrix.protocol import ForwardBatch, ForwardMode

#: Total lengths; the two rows before each are looked at as well.
LENGTHS = (1, 63, 64, 65, 96, 97, 127, 128, 129, 513)
ROWS, VOCABULARY = 3, 40
MODES = {"extend": "eager", "target-verify": "verify-eager"}
MATRIX = load_matrix(find_matrix())


def scenario_at(length, ratio, device, heads=16, most=ROWS, forward="extend"):
    """A step of one request with up to ``most`` rows, the last one seeing ``length`` tokens."""
    rows = min(most, length)
    variant = Variant(f"bits-{length}", forward, (length - rows,), (rows,), heads=heads, sink="per-head")
    case = Case(f"r{ratio}-prefill-bits-{length}", "case", MATRIX.cell(f"r{ratio}/{MODES[forward]}"), variant)
    return assemble(case, plan_steps(case.cell.mode, variant), MATRIX, device, FINE)


def served(scenario, path, backend_type=DSV4TritonBackend):
    """``(out, lse)`` of the extend, and of a decode of each of its rows, over one cache."""
    step, placement, runner = scenario.steps[0], scenario.placements[0], scenario.runner
    backend = backend_type(replace(runner, prefill_path=path))
    poison_pools(backend.kv_buffers())
    backend.set_key_buffer(placement.history_loc, placement.history_k)
    if step.ratio and placement.entry_loc.numel():
        backend.set_extra_key_buffer(step.ratio, placement.entry_loc, placement.entry_k)
    inputs = StepInputs.of(step, placement)
    together = run_eager_step(backend, inputs)
    cache = {name: buffer.clone() for name, buffer in backend.kv_buffers().items()}
    single = []
    for row in range(step.q.shape[0]):
        one = slice(row, row + 1)
        length = int(step.positions[row]) + 1
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=placement.batch.req_pool_indices,
            seq_lens=step.positions[one] + 1,
            out_cache_loc=placement.batch.out_cache_loc[one],
            positions=step.positions[one],
            seq_lens_cpu=[length],
        )
        own = {name: None if (t := getattr(inputs, name)) is None else t[one] for name in ("compressed", "selection")}
        single.append(run_eager_step(backend, replace(inputs, batch=batch, q=step.q[one], k=step.k[one], **own)))
    for name, buffer in backend.kv_buffers().items():
        assert torch.equal(cache[name], buffer), "the decodes changed the cache: not the same bytes were read"
    return together, tuple(torch.cat(parts) for parts in zip(*single, strict=True))


def declared(ratio, path):
    return {bits.path: bits for bits in MATRIX.cell(f"r{ratio}/eager").prefill_bits}[path]


def log_probs(out):
    """fp32 ``[T, V]``: a fixed projection of each row by itself, then the backend's log_softmax."""
    generator = torch.Generator().manual_seed(20240)
    head = torch.randn(out[0].numel(), VOCABULARY, generator=generator).to(out.device) / 16
    logits = torch.stack([(row.float().flatten()[:, None] * head).sum(0) for row in out])
    found = log_softmax(logits)
    assert np.array_equal(found.cpu().numpy().view(np.uint32), log_softmax_bits(logits.cpu().numpy()).view(np.uint32))
    return found


def divergent(scenario, path, backend_type=DSV4TritonBackend):
    """Total lengths of the rows whose bits differ."""
    together, single = served(scenario, path, backend_type)
    pairs = [*zip(together, single, strict=True), (log_probs(together[0]), log_probs(single[0]))]
    rows = together[0].shape[0]
    same = [all(bit_equal(a[row], b[row]) for a, b in pairs) for row in range(rows)]
    return [int(p) + 1 for p, equal in zip(scenario.steps[0].positions, same, strict=True) if not equal]


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_dense_prefill_has_the_bits_of_decode(ratio, device):
    assert declared(ratio, "dense").bitwise
    lengths = (1, 65, 97, 129, 513) if device == "cpu" else LENGTHS
    for heads in (16,) if device == "cpu" else (16, 64):  # another kernel on some GPUs
        scenarios = (scenario_at(length, ratio, device, heads) for length in lengths)
        assert [n for scenario in scenarios for n in divergent(scenario, "dense")] == []


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_verify_rows_have_the_bits_of_decode(ratio, device):
    lengths = (66, 129) if device == "cpu" else LENGTHS[1:]
    scenarios = (scenario_at(length, ratio, device, forward="target-verify") for length in lengths)
    assert [n for scenario in scenarios for n in divergent(scenario, "auto")] == []


@pytest.mark.parametrize("ratio", [0, 4])
def test_a_prompt_in_one_chunk_has_the_bits_of_decode(ratio, device):
    """Keys of the same chunk are read as those of the cache are: where the chunk begins moves no split."""
    length = 20 if device == "cpu" else 1300
    assert divergent(scenario_at(length, ratio, device, most=length), "dense") == []


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_sparse_prefill_differs_from_its_declared_length_on(ratio, device):
    bits = declared(ratio, "sparse")
    assert bits.bitwise is False
    lengths = (1, 4, 65, 129) if device == "cpu" else (*range(1, 13), *LENGTHS[1:])
    found = sorted({n for length in lengths for n in divergent(scenario_at(length, ratio, device), "sparse")})
    assert found, "the sparse path has the bits of decode: declare it"
    assert found[0] >= bits.first_divergent_kv_len, f"rows of {found[0]} tokens differ already: declare that"


def test_splits_that_follow_the_number_of_rows_are_seen(device, monkeypatch):
    """The defect: a prefill of several rows splits its keys where a single decode does not."""
    launch = attention.launch

    def by_rows(q, *arguments):
        monkeypatch.setattr(attention, "SPLIT_KEYS", 640 if q.shape[0] == 1 else 64)
        launch(q, *arguments)

    monkeypatch.setattr(flash_mla, "launch", by_rows)
    assert divergent(scenario_at(129, 0, device), "dense") != []
