"""The step after a verify, attention and all: on a GPU every position modulo 128, draft count and acceptance at once.

The matrix declares a choice of these; here one ragged batch has a request for each, judged as the matrix judges. On a
CPU a few requests go the same way, and ``test_after_verify`` sweeps the metadata.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsv4_matrix.declaration import Case, Cell, State, Variant, load_matrix
from dsv4_matrix.execution import Setup, execute
from dsv4_matrix.loading import load_backend, load_reference
from dsv4_matrix.machine import find_machine
from dsv4_matrix.report.result import Outcome

MATRIX = Path(__file__).parents[2] / "matrix.yaml"
GPU = torch.cuda.is_available()
#: Ratio: positions at which chains start, and their draft counts. A window that is full matters where there is no more.
SWEEPS = {
    0: (range(128, 256), (8,)) if GPU else ((125, 254), (3,)),
    4: (range(128), range(2, 9)) if GPU else ((2,), (2, 3)),
    128: (range(128), range(2, 9)) if GPU else ((126,), (2, 3)),
}


@pytest.mark.parametrize("reuse", ["next-step", "freed"])
@pytest.mark.parametrize("ratio", SWEEPS)
def test_nothing_of_a_rejected_draft_is_attended(ratio, reuse):
    starts, drafts = SWEEPS[ratio]
    if reuse == "freed":
        # what a newcomer finds in freed slots depends on their number, not on who freed them
        drafts = drafts[-1:]
    requests = [(start, n, kept) for n in drafts for start in starts for kept in range(1, n + 1)]
    prefix_lens, extend_lens, accept_lens = zip(*requests, strict=True)
    variant = Variant(
        name=f"sweep-{reuse}",
        forward="target-verify",
        prefix_lens=prefix_lens,
        extend_lens=extend_lens,
        accept_lens=accept_lens,
        reuse=reuse,
        heads=16,
        sink="per-head",
        history="window",
    )
    matrix = load_matrix(MATRIX)
    cell = Cell(ratio, "verify-eager", State.COVERED, (variant,))
    case = Case(f"r{ratio}-verify-eager-{variant.name}", "case", cell, variant)
    found = execute(case, Setup(matrix, find_machine(), load_backend(), load_reference()))
    assert found.result.outcome is Outcome.PASSED, found.message
