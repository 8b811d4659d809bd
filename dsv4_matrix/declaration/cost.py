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

    EXTEND runs both prefill paths. A graph mode runs every batch eagerly (a draft runner twice, with metadata of its
    own and made per step) and replayed, which must agree bit for bit; see ``_captured`` for the rest.
    """
    batches = (variant.prefix_lens, *variant.replays)
    per_request = max(variant.extend_lens, default=1)
    # The case's own batch may be ragged; a replay of a graph has the same number of rows for every request.
    first = _batch(ratio, variant, variant.prefix_lens, variant.extend_lens or (1,) * len(variant.prefix_lens))
    total = first + sum(_batch(ratio, variant, batch, (per_request,) * len(batch)) for batch in variant.replays)
    if variant.forward == "extend":
        total *= 2
    if variant.accept_lens:
        kept = tuple(p + a for p, a in zip(variant.prefix_lens, variant.accept_lens, strict=True))
        total += _batch(ratio, variant, kept, (1,) * len(kept))
    if DRIVES[mode].graph:
        eager_legs = 2 if variant.num_steps else 1
        total = (eager_legs + 1) * total + first + _captured(variant, batches, per_request)
    return max(1, round(total))


def _captured(variant: Variant, batches: Sequence[Sequence[int]], per_request: int) -> float:
    """What a graph adds besides its batches: pad rows. They fill the warm-up, the capture and an idle replay, and what
    each batch leaves of the bucket; the first batch is replayed once more at the end.
    """
    bucket = variant.bucket or max(len(batch) for batch in batches)
    empty = sum(bucket - len(batch) for batch in (*batches, batches[0]))
    full = bucket * (2 if any(not batch for batch in batches) else 3)
    rows = per_request * max(variant.num_steps - 1, 1)
    return (empty + full) * rows * (_heads(variant) + METADATA_COST)


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
