"""Static cost: row-blocks counted from lengths, by hand for small variants."""

from __future__ import annotations

import pytest

from dsv4_matrix.declaration import Matrix, Variant, read_matrix
from dsv4_matrix.declaration.cost import METADATA_COST, STORE_COST, static_cost


def cost(ratio: int, mode: str, **fields: object) -> int:
    return static_cost(ratio, mode, Variant(name="x", **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ratio", "prefix", "blocks", "stores"),
    [
        (0, 63, 1, 1),  # 64 keys
        (0, 64, 2, 1),  # 65 keys
        (0, 1000, 2, 16),  # the window
        (4, 3, 2, 1),  # 4 keys and the entry that the row itself completes
        (4, 2, 1, 1),  # no entry yet
        (4, 255, 3, 5),  # 64 entries
        (4, 8191, 10, 128 + 32),  # 512 of 2048 entries
        (128, 126, 2, 2),
        (128, 127, 3, 2),
    ],
)
def test_decode_counts_key_blocks_and_stores(ratio: int, prefix: int, blocks: int, stores: int) -> None:
    got = cost(ratio, "eager", forward="decode", prefix_lens=(prefix,))
    assert got == round(blocks + METADATA_COST + STORE_COST * stores)


def test_heads_beyond_64_count_again() -> None:
    fields = {"forward": "decode", "prefix_lens": (200,) * 50, "history": "window"}
    by_heads = [cost(0, "eager", heads=heads, **fields) for heads in (16, 64, 128)]
    assert by_heads[0] == by_heads[1]
    assert by_heads[2] - by_heads[1] == 100


def test_extend_runs_both_paths() -> None:
    assert cost(0, "eager", forward="extend", prefix_lens=(0,), extend_lens=(64,)) == round(
        2 * 64 * (1 + METADATA_COST)
    )


def test_graph_runs_every_batch_twice_and_pads() -> None:
    got = cost(0, "cg-decode", forward="decode", prefix_lens=(0,), replays=((0, 0), (), (0,)), bucket=3)
    live = 2 * 4 + 1  # eager and replayed, the first batch once more
    pads = 2 * 3 + (2 + 1 + 3 + 2 + 2)  # warm-up and capture; the rest of the bucket behind each of five replays
    assert got == round((live + pads) * (1 + METADATA_COST))


def test_graph_without_an_idle_batch_gets_one() -> None:
    fields = {"forward": "decode", "prefix_lens": (0,), "bucket": 1}
    idle = cost(0, "cg-decode", replays=((0,),) * 40 + ((),), **fields)
    busy = cost(0, "cg-decode", replays=((0,),) * 40, **fields)
    assert busy == idle


def test_draft_runner_runs_two_eager_chains() -> None:
    got = cost(0, "eagle-draft-runner", forward="decode", prefix_lens=(0,), num_steps=5, replays=((0,),) * 3)
    rows = 4 * (3 * 4 + 1)  # four steps: two eager chains and the replays of four batches, the first once more
    pads = 4 * 3  # warm-up, capture, idle replay
    assert got == round((rows + pads) * (1 + METADATA_COST))


def test_stated_cost_stands(small: str) -> None:
    text = small.replace("name: decode,", "name: decode, cost: 77,")
    costs = {variant.name: variant.cost for variant in read_matrix(text.encode(), "m.yaml").cell("r0/eager").variants}
    assert costs["decode"] == 77
    assert costs["extend"] == 77


def test_no_variant_is_free(own_matrix: Matrix) -> None:
    assert min(variant.cost for cell in own_matrix.cells for variant in cell.variants) >= 1
