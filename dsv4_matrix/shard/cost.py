"""What a case weighs in a plan: its declared cost and, on a GPU, what every step takes whatever its size.

Interpreted, a case takes as long as its attention, which the declared cost counts in row-blocks. On a GPU a block is
nearly free, and the time goes to the host: it builds, drives and judges each step by the same calls for one row as for
a hundred. Steps are counted from the declaration alone, never measured, so that a plan is the same everywhere.
"""

from __future__ import annotations

from dsv4_matrix.declaration.drives import DRIVES
from dsv4_matrix.declaration.model import Case, Variant

#: Probes and refusals drive one small call each; a variant says its own cost.
PROBE_COST = 1
#: Row-blocks that take a GPU as long as the host takes for a step, and for what a case does once.
STEP_COST, CASE_COST = 300, 200


def cost_of(case: Case, device: str) -> int:
    """Static cost of ``case`` on ``device``, ``gpu`` or ``cpu``; only costs of one device compare."""
    if case.variant is None or case.cell is None:
        return PROBE_COST
    if device != "gpu":
        return case.variant.cost
    return case.variant.cost + CASE_COST + STEP_COST * _steps(case.cell.mode, case.variant)


def other_test_cost(device: str) -> int:
    """Of a test that runs no case and so declares none: half a second interpreted, on a GPU a case of three steps."""
    return 50 if device != "gpu" else CASE_COST + 3 * STEP_COST


def _steps(mode: str, variant: Variant) -> int:
    """A graph runs every batch of its replays; a draft runner takes ``num_steps - 1`` steps over each batch."""
    batches = 1 + (len(variant.replays) if DRIVES[mode].graph else 0)
    behind_verify = 1 if variant.accept_lens else 0
    return batches * max(variant.num_steps - 1, 1) + behind_verify
