"""What every stub project starts with: a backend and a reference that nothing calls, and how a stub takes over a run.

``stub_project`` puts this text before a stub's own, as one module ``stub`` of a project that a test writes. The stub
defines its matrix and ``execute(case, setup)``, and ends with ``take_over``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsv4_matrix import execution
from dsv4_matrix.context import Context
from dsv4_matrix.declaration.model import Budget, Cell, Geometry, Matrix, Mode, Tolerance, Tolerances
from dsv4_matrix.machine import Machine


class Backend:
    """Right names and shapes, and nothing else: the stub's execution never calls it."""

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
    """The same of a reference."""

    def visible(self, ratio, positions, selection=None, *, window=128, early=0): ...
    def quantise_dequantise(self, k): ...
    def attend(self, q, bank, index, sink, scale): ...
    def attend_low_precision(self, q, bank, index, sink, scale): ...


reference = Reference()


def matrix_of(modes: dict[str, str], cells: tuple[Cell, ...]) -> Matrix:
    """A matrix of ``cells``, whose modes have these titles; its file is the stub's own."""
    return Matrix(
        path=__file__,
        sha256="ab" * 32,
        geometry=Geometry(256, 512, 448, 64, 128, 584),
        tolerances=Tolerances(Tolerance(5e-2, 5e-2), Tolerance(1e-1, 1e-1), Budget(2.0, 1.0, 1.0, 1e-5, 2.0, 8.0)),
        ratios=tuple(sorted({cell.ratio for cell in cells})),
        modes=tuple(Mode(name, title, "") for name, title in modes.items()),
        cells=cells,
        refusals=(),
    )


def take_over(matrix: Matrix, execute: Callable[..., Any], kind: str = "cpu", model: str = "CPU interpreter") -> None:
    """From here on this process runs cases of ``matrix`` by ``execute``, on a machine that is not looked at."""
    execution.execute = execute
    Context.matrix = property(lambda self: matrix)
    Context.machine = property(lambda self: Machine(kind, "cpu", model, "2.13.0", "3.7.1"))
