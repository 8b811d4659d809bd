"""Tiny projects for the plugin: a stub matrix, backend and execution, so that a run takes milliseconds."""

from __future__ import annotations

import textwrap

import pytest

#: What a tiny project imports first: a matrix of a few values, and cases that do what their variant's name says.
STUB = '''
import os
import sys
import time

from dsv4_matrix import execution
from dsv4_matrix.context import Context
from dsv4_matrix.declaration.model import (
    Budget, Cell, Geometry, Matrix, Mode, Probe, State, Tolerance, Tolerances, Variant,
)
from dsv4_matrix.execution import Execution
from dsv4_matrix.machine import Machine
from dsv4_matrix.report.result import Outcome, Result


def variant(name, devices=("cpu", "gpu")):
    return Variant(name=name, forward="decode", prefix_lens=(64,), devices=devices)


NAMES = os.environ.get("STUB_VARIANTS", "good-a,good-b").split(",")
ON_GPU = variant("huge", devices=("gpu",))
MATRIX = Matrix(
    path=__file__,
    sha256="ab" * 32,
    geometry=Geometry(256, 512, 448, 64, 128, 584),
    tolerances=Tolerances(Tolerance(5e-2, 5e-2), Tolerance(1e-1, 1e-1), Budget(2.0, 1.0, 1.0, 1e-5, 2.0, 8.0)),
    ratios=(0, 4),
    modes=(Mode("eager", "Eager", ""), Mode("de-eager", "DE eager", "")),
    cells=(
        Cell(0, "eager", State.COVERED, tuple(variant(name) for name in NAMES)),
        Cell(4, "eager", State.COVERED, (ON_GPU,)),
        Cell(0, "de-eager", State.DEFERRED, reason="later", probe=Probe("page-size", "AssertionError", "page")),
        Cell(4, "de-eager", State.NOT_APPLICABLE, reason="never", probe=Probe("page-size", "AssertionError", "page")),
    ),
    refusals=(),
)


class Backend:
    """Right names and shapes, and nothing else: the stub execution never calls it."""

    def __init__(self, runner): ...
    def kv_buffers(self): ...
    def set_key_buffer(self, loc, k): ...
    def set_extra_key_buffer(self, compress_ratio, loc, entries): ...
    def init_forward_metadata(self, batch): ...
    def init_cuda_graph_state(self, max_bs, max_num_tokens): ...
    def init_forward_metadata_out_graph(self, batch, *, in_capture=False): ...
    def init_forward_metadata_in_graph(self, batch): ...
    def on_after_cuda_graph_warmup(self): ...
    def store_kv(self, batch, k): ...
    def store_compressed(self, batch, compress_ratio, entries): ...
    def write_c4_selection(self, raw): ...
    def forward(self, q, batch, compress_ratio, attn_sink): ...
    @classmethod
    def multi_step(cls, runner, *, num_steps, compress_ratio=0): ...


class Reference:
    def visible(self, ratio, positions, selection=None, *, window=128, early=0): ...
    def quantise_dequantise(self, k): ...
    def attend(self, q, bank, index, sink, scale): ...
    def attend_low_precision(self, q, bank, index, sink, scale): ...


reference = Reference()


def execute(case, setup):
    def result(outcome, reason="", margin="0.50"):
        return Result(case.id, case.cell_id, case.kind, outcome, reason, margin, captures=1, replays=3)

    if "crash" in case.id:
        os._exit(3)
    if "bad" in case.id:
        return Execution(result(Outcome.FAILED, "worst row 3", "7.5"), f"case {case.id}\\nworst row 3: got 1, want 2")
    if "raise" in case.id:
        raise RuntimeError("broken harness at /some/where/file.py")
    if "touch" in case.id:
        with open(__file__, "a") as source:
            source.write("# changed under way")
    return Execution(result(Outcome.PASSED), "")


execution.execute = execute
Context.matrix = property(lambda self: MATRIX)
Context.machine = property(lambda self: Machine("cpu", "cpu", "CPU interpreter", "2.13.0", "3.7.1"))
'''

CASES = """
    def test_cell(matrix_case):
        matrix_case.execute()
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project of somebody else: own test file over ``matrix_case``, stub backend and reference given by path."""
    pytester.makepyfile(stub=STUB, conftest="import stub", test_mine=textwrap.dedent(CASES))
    pytester.makeini(
        """
        [pytest]
        matrix_backend = stub:Backend
        matrix_reference = stub:reference
        addopts = -p no:cacheprovider -p no:hypothesispytest
        """
    )
    return pytester
