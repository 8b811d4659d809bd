"""What this backend's kernels promise about their bits, by kernel path and architecture; checked by the gate.

Levels: L0 the same plan again, L1 another order or process count, L2 another batch, L3 inside a graph, L4 another
device of the same model. Architectures are the names of ``target.TARGETS``.
"""

from __future__ import annotations

from dsv4_triton.target import TARGETS

#: The arithmetic of these is fixed operation by operation, so that all architectures have the same bits.
_EXACT = ("coins", "chain-verify", "log-softmax")

DETERMINISM = (
    *(
        {"path": path, "architectures": tuple(TARGETS), "promise": "L4", "concurrency": "batch_invariant"}
        for path in _EXACT
    ),
    # Splits of a fixed number of keys, joined in order, no autotuning; docs/guarantees.md says what ran where.
    *(
        {"path": path, "architectures": ("sm90", "interpreter"), "promise": "L3", "concurrency": "batch_invariant"}
        for path in ("attention", "sparse-prefill")
    ),
    # fp64 logarithms of the platform: the same bits on one model, the same tokens on all
    {"path": "seeded-sample", "architectures": tuple(TARGETS), "promise": "L4", "concurrency": "batch_invariant"},
)
