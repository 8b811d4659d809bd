"""What is measured is really called: the bench's work, run once with the clock replaced, on interpreted kernels."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dsv4_matrix.bench import command, floors, measure, steps
from dsv4_matrix.bench.floors import Ceilings
from dsv4_matrix.bench.kernels import Kernel, find_kernel
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
        monkeypatch.setattr(module, "replays", lambda graphs: [[10.0] * 20 for _ in graphs])
    for module in (floors, steps):
        monkeypatch.setattr(module, "sample", sample)
    return done


def test_a_shape_is_measured_beside_the_peer(worked):
    kernel = find_kernel(KERNEL)
    told = []
    got = measure.measure([SMALL], kernel, kernel, {SMALL: 15.0}, CEILINGS, CPU, told.append)
    assert got == told
    (out, lse), (again, _) = worked
    assert out.shape == (1, 2, 16, 512)
    assert lse.shape == (1, 16, 2)
    assert bool(out.isfinite().all())
    assert bool(out.any())
    assert torch.equal(out, again)
    assert (got[0].median, got[0].table, got[0].beside, got[0].ratio) == (10.0, 15.0, 10.0, 1.0)
    assert got[0].choice.startswith("portable: ")


def test_a_kernel_without_a_choice_of_kernels(worked):
    plain = Kernel("mine", find_kernel(KERNEL).function, lambda: (None, None))
    assert measure.measure([SMALL], plain, None, {}, CEILINGS, CPU, print)[0].choice == ""


def test_ceilings_are_formed_from_what_was_timed(worked):
    ceilings = floors.measure_ceilings(CPU)
    assert len(worked) == 2
    assert ceilings.bytes_per_second == pytest.approx(2 * 1024 / 10e-6)
    assert ceilings.flops_per_second == pytest.approx(2 * 8**3 / 10e-6)


def test_steps_call_the_backend_as_a_runner_does(worked, monkeypatch):
    monkeypatch.setattr(steps, "REQUESTS", 2)
    monkeypatch.setattr(steps, "CONTEXT", 2048)
    monkeypatch.setattr(steps, "HEADS", 16)
    monkeypatch.setattr(steps, "STORE_ROWS", (3,))
    monkeypatch.setattr(steps, "device_launches", lambda work: (work(), 2)[1])
    got = steps.measure_steps(load_backend("dsv4_triton:DSV4TritonBackend").factory, CEILINGS, CPU)
    found = {step.name: step.value for step in got}
    assert found["metadata of 256 decode rows, launches"] == 2
    assert found["pack and store of 3 rows, speed of a copy"] == 100
    assert found["step of 256 rows, whole over its parts"] == pytest.approx(20)
    out, lse = worked[-1]
    assert out.shape == (2, 16, 512)
    assert bool(out.isfinite().all())
    assert bool(lse.isfinite().all()), "attention saw no key: the step's stores went nowhere"


def test_the_command_prints_and_leaves_files(worked, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "device", lambda *_: CPU)
    monkeypatch.setattr(command, "_machine", lambda device, kernel: {"kernel": kernel, "gpu": "G"})
    other = dataclasses.replace(SMALL, batch=2)
    monkeypatch.setattr(command, "peer_table", lambda: PeerTable("peer", "G", "now", {SMALL: 15.0, other: 20.0}))
    status = command.run_bench(
        kernel=KERNEL, backend=None, shapes=None, long=False, steps=False, json_path=str(tmp_path / "b.json"),
        plot_path=None,
    )  # fmt: skip
    out = capsys.readouterr().out
    assert status == 0
    assert "geometric mean 1.732, worst 1.500 (c4-h16-k16-b1-q2)" in out
    assert "portable: " in out
    assert '"geometric_mean": 1.73' in (tmp_path / "b.json").read_text()
