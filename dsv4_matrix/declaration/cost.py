"""Static cost of a variant, in row-blocks: what shards are planned by and what the CPU budget is counted in.

One row-block is the attention of one row, up to 64 heads, over 64 keys: about 11 ms in Triton's interpreter, the
slowest place that runs the matrix. Computed from the lengths alone, never from a measured time, so that a plan is the
same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsv4_matrix.declaration.drives import DRIVES
from dsv4_matrix.declaration.model import Variant

WINDOW = 128
BLOCK_KEYS = 64
BLOCK_HEADS = 64
#: A store program takes about 17 ms interpreted, whatever it holds; a backend made for that packs 64 rows in one.
STORE_ROWS = 64
STORE_COST = 1.5
#: Metadata of one row, about 2.3 ms.
METADATA_COST = 0.2


def static_cost(ratio: int, mode: str, variant: Variant) -> int:
    """Row-blocks that ``variant`` takes in the cell ``r<ratio>/<mode>``, at least 1.

    EXTEND runs both prefill paths. A graph mode runs every batch twice (replayed and eager, which must agree bit for
    bit) and besides warms up and captures a bucket of pad rows.
    """
    batches = (variant.prefix_lens, *variant.replays)
    per_request = max(variant.extend_lens, default=1)
    total = 0.0
    for batch in batches:
        # The case's own batch may be ragged; a replay of a graph has the same number of rows for every request.
        counts = (
            variant.extend_lens if batch is variant.prefix_lens and variant.extend_lens else (per_request,) * len(batch)
        )
        total += _batch(ratio, variant, batch, counts) * (2 if variant.forward == "extend" else 1)
    if variant.accept_lens:
        kept = tuple(p + a for p, a in zip(variant.prefix_lens, variant.accept_lens, strict=True))
        total += _batch(ratio, variant, kept, (1,) * len(kept))
    if DRIVES[mode].graph:
        bucket = variant.bucket or max((len(batch) for batch in batches), default=0)
        pad_rows = bucket * per_request * max(variant.num_steps - 1, 1)
        total = 2 * total + 2 * pad_rows * (_heads(variant) + METADATA_COST)
    return max(1, round(total))


def _batch(ratio: int, variant: Variant, prefix_lens: Sequence[int], counts: Sequence[int]) -> float:
    """History, then every row of one batch; a draft runner takes ``num_steps - 1`` rows of each request."""
    total = 0.0
    for prefix, count in zip(prefix_lens, counts, strict=True):
        written = prefix if variant.history == "full" else min(prefix, WINDOW - 1)
        total += STORE_COST * -(-written // STORE_ROWS)
        total += STORE_COST * -(-_entries(ratio, prefix) // STORE_ROWS)
        for position in range(prefix, prefix + max(count, variant.num_steps - 1)):
            total += METADATA_COST + _heads(variant) * _key_blocks(ratio, position, variant.index_topk)
    return total


def _entries(ratio: int, tokens: int) -> int:
    return tokens // ratio if ratio else 0


def _heads(variant: Variant) -> int:
    return -(-variant.heads // BLOCK_HEADS)


def _key_blocks(ratio: int, position: int, topk: int) -> int:
    entries = _entries(ratio, position + 1)
    if ratio == 4:
        entries = min(entries, topk)
    return -(-min(position + 1, WINDOW) // BLOCK_KEYS) + -(-entries // BLOCK_KEYS)
