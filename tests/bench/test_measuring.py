"""What is measured is really called: the bench's work, run once with the clock replaced, on interpreted kernels."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dsv4_matrix.bench import document, floors, measure, session, steps
from dsv4_matrix.bench.command import run_bench
from dsv4_matrix.bench.inputs import build_inputs
from dsv4_matrix.bench.kernels import Kernel, find_kernel
from dsv4_matrix.bench.launches import LaunchError
from dsv4_matrix.bench.request import Request
from dsv4_matrix.bench.results import LONG_CONTEXT, PEER_TABLE, Ceilings
from dsv4_matrix.bench.shapes import PeerTable, Shape
from dsv4_matrix.loading import load_backend

CPU = torch.device("cpu")
CEILINGS = Ceilings(4.3e12, 790e12)
KERNEL = "dsv4_triton:flash_mla_with_kvcache"
SMALL = Shape(4, 16, 1, 2, 8, 8, 8, 4, True)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the clock need not be replaced")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr("dsv4_matrix.bench.inputs.SLOTS_MULTI_ROW", (16, 16))
    monkeypatch.setattr(floors, "COPY_BYTES", 1024)
    monkeypatch.setattr(floors, "MATRIX_SIDE", 8)


@pytest.fixture
def worked(monkeypatch):
    """Every piece of work that would have been timed, in order; each is run once and said to take 10 us."""
    done: list[object] = []

    def captured(work):
        done.append(work())
        return work

    def sample(work, repeats=20, flush=False):
        captured(work)
        return [10.0] * repeats

    for module in (measure, steps):
        monkeypatch.setattr(module, "captured", captured)
        monkeypatch.setattr(module, "replays", lambda graphs, flush=True: [[10.0] * 20 for _ in graphs])
    monkeypatch.setattr(floors, "sample", sample)
    monkeypatch.setattr(steps, "graph_launches", lambda work: (work(), 2)[1])
    monkeypatch.setattr(steps, "kernel_microseconds", lambda work: (work(), 8.0)[1])
    return done


FILL = steps._fill


@pytest.fixture
def small_steps(monkeypatch):
    """Two requests; their history, which takes interpreted stores seconds, is left to the test that asks for it."""
    monkeypatch.setattr(steps, "_fill", lambda backend, runner: None)
    monkeypatch.setattr(steps, "REQUESTS", 2)
    monkeypatch.setattr(steps, "CONTEXT", 2048)
    monkeypatch.setattr(steps, "HEADS", 16)
    monkeypatch.setattr(steps, "STORE_ROWS", (3, 1024))


@pytest.fixture
def gpu(monkeypatch):
    """A GPU as far as the command asks for one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "device", lambda *_: CPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "G")
    other = dataclasses.replace(SMALL, batch=2)
    table = PeerTable("peer", "G", "now", {SMALL: 15.0, other: 20.0})
    monkeypatch.setattr(session, "peer_table", lambda: table)
    monkeypatch.setattr(session, "long_shapes", lambda: [dataclasses.replace(SMALL, extra_topk=16), SMALL])


def test_a_shape_is_measured_beside_the_peer(worked):
    kernel = find_kernel(KERNEL)
    told = []
    measure.measure([SMALL], kernel, kernel, {SMALL: 15.0}, CEILINGS, CPU, told.append)
    (got,) = told
    (out, lse), (again, _) = worked
    assert out.shape == (1, 2, 16, 512)
    assert lse.shape == (1, 16, 2)
    assert bool(out.isfinite().all())
    assert bool(out.any())
    assert torch.equal(out, again)
    assert (got.median, got.table, got.beside, got.ratio) == (10.0, 15.0, 10.0, 1.0)
    assert got.choice.startswith("portable: ")
    assert got.kernel == "portable"


def test_a_kernel_without_a_choice_of_kernels(worked):
    plain = Kernel("mine", find_kernel(KERNEL).function, lambda: (None, None))
    told = []
    measure.measure([SMALL], plain, None, {}, CEILINGS, CPU, told.append)
    assert told[0].choice == told[0].kernel == ""


def test_ceilings_are_formed_from_what_was_timed(worked):
    ceilings = floors.measure_ceilings(CPU)
    assert len(worked) == 3, "two ways to copy, one product"
    assert ceilings.bytes_per_second == pytest.approx(2 * 1024 / 10e-6)
    assert ceilings.flops_per_second == pytest.approx(2 * 8**3 / 10e-6)


def test_steps_call_the_backend_as_a_runner_does(worked, small_steps, monkeypatch):
    monkeypatch.setattr(steps, "_fill", FILL)
    made = []

    def factory(runner):
        made.append(load_backend("dsv4_triton:DSV4TritonBackend").factory(runner))
        return made[0]

    got = list(steps.measure_steps(factory, CPU))
    found = {step.name: (step.value, step.goal) for step in got}
    assert found["metadata of 2 decode rows, launches"] == (2, "at most 3: met")
    assert found["metadata of 2 decode rows"] == (10, "at most 20: met")
    assert found["pack and store of 3 rows, speed of that copy"] == (100, "at least 70: met")
    assert found["step of 2 rows, whole over its kernels"] == (125, "at most 110: not met")
    assert [name for name, (_, goal) in found.items() if goal] == [
        "metadata of 2 decode rows, launches",
        "metadata of 2 decode rows",
        "pack and store of 3 rows, speed of that copy",
        "pack and store of 1024 rows, speed of that copy",
        "step of 2 rows, whole over its kernels",
    ]
    out, lse = worked[-1]
    assert out.shape == (2, 16, 512)
    assert bool(out.isfinite().all())
    assert bool(lse.isfinite().all()), "attention saw no key: the step's stores went nowhere"
    core = made[0].forward_metadata.core_attn_metadata
    assert core.swa_topk_lengths.tolist() == [128, 128], "the graph was left with the inputs of its capture"
    assert core.c4_sparse_topk_lengths.tolist() == [512, 512]
    assert bool((core.c4_sparse_page_indices >= 0).all())
    for pool, entries in (("swa", 256), ("c4", 64)):
        used = made[0].kv_buffers()[pool][1:]
        assert bool((used[:, : entries * 576].view(len(used), entries, 576) != 0).any(2).all()), f"{pool} is not full"


def test_the_command_prints_and_leaves_a_document(worked, gpu, capsys, tmp_path):
    path = tmp_path / "b.json"
    status = run_bench(Request(kernel=KERNEL, json=path, plot=tmp_path / "b.svg"))
    out = capsys.readouterr().out
    assert status == 0
    assert "geometric mean 1.732 (goal 1.15), worst 1.500 of c4-h16-k16-b1-q2 (goal 0.95)" in out
    assert "portable: " in out
    assert "2 shapes and 0 steps in " in out
    found = document.read(path)
    assert found.finished
    assert [one.shape.name for one in found.groups[PEER_TABLE]] == ["c4-h16-k16-b1-q2", "c4-h16-k16-b2-q2"]
    assert "c4-h16-k16-b2-q2" in (tmp_path / "b.svg").read_text()


def test_steps_and_long_contexts_are_measured_instead_of_the_table(worked, gpu, small_steps, capsys, tmp_path):
    path = tmp_path / "b.json"
    request = Request(kernel=KERNEL, backend="dsv4_triton:DSV4TritonBackend", steps=True, long=True, json=path)
    assert run_bench(request) == 0
    found = document.read(path)
    assert list(found.groups) == [LONG_CONTEXT]
    assert len(found.steps) == 17
    out = capsys.readouterr().out
    # 10 us each of 2 rows and 16 or 24 keys
    assert "c4-h16-b1-q2: ps a key and row at 16: 312500, 24: 208333; longest over shortest 0.67" in out


def test_what_was_measured_before_the_end_is_there(worked, gpu, monkeypatch, capsys, tmp_path):
    """A run ended in its second shape: the document has the first and says that it is not whole."""
    path = tmp_path / "b.json"
    seen = []

    def build(shape, device):
        if seen:
            seen.append(document.read(path))
            raise KeyboardInterrupt
        seen.append(shape)
        return build_inputs(shape, device)

    monkeypatch.setattr(measure, "build_inputs", build)
    with pytest.raises(KeyboardInterrupt):
        run_bench(Request(kernel=KERNEL, json=path))
    found = seen[1]
    assert [one.median for one in found.groups[PEER_TABLE]] == [10.0]
    assert (found.planned, found.finished) == ({PEER_TABLE: 2}, False)
    capsys.readouterr()
    assert run_bench(Request(source=path)) == 0
    assert "cut short: 1 of 2 shapes of the peer table" in capsys.readouterr().out


def test_a_driver_that_counts_nothing_ends_the_steps_and_says_so(
    worked, gpu, small_steps, monkeypatch, capsys, tmp_path
):
    def blind(graph):
        raise LaunchError("torch.profiler saw no kernel")

    monkeypatch.setattr(steps, "kernel_microseconds", blind)
    request = Request(backend="dsv4_triton:DSV4TritonBackend", steps=True, json=tmp_path / "b.json")
    assert run_bench(request) == 1
    told = capsys.readouterr()
    assert told.err == "dsv4-matrix bench: torch.profiler saw no kernel\n"
    assert "cut short" in told.out
    assert len(document.read(tmp_path / "b.json").steps) == 14


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request(shapes="c5-*"), "no shape matches 'c5-*'"),
        (Request(kernel="dsv4_triton:nothing"), "dsv4_triton has no nothing"),
        (Request(steps=True, backend="nothing"), "there is no backend 'nothing'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(worked, gpu, request_, said, capsys):
    assert run_bench(request_) == 2
    assert said in capsys.readouterr().err
    assert worked == []
