"""The two-run gate: everything that must not matter is changed, everything that may matter is attested equal.

Exit status 0 only if all bits of all covered cases agree, enough of them were compared, every compared case passed its
own judgement, and the canaries were caught. Bad input, found here or by a run, is 2. Anything else is 1, a crashed run
and a refused comparison included.
"""

from __future__ import annotations

from dsv4_matrix.gate.compare import Mismatch, Run, Verdict, compare
from dsv4_matrix.gate.plan import PLAN_A, PLAN_B, RunPlan, sampled
from dsv4_matrix.gate.rows import RowStore
from dsv4_matrix.gate.run import GateError, Record, read_run, row_store, run_gate, write_attestations, write_refusal

__all__ = [
    "PLAN_A",
    "PLAN_B",
    "GateError",
    "Mismatch",
    "Record",
    "RowStore",
    "Run",
    "RunPlan",
    "Verdict",
    "compare",
    "read_run",
    "row_store",
    "run_gate",
    "sampled",
    "write_attestations",
    "write_refusal",
]
