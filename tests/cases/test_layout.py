"""The physical half of a case: no two live tokens share a byte, and what nobody owns is a trap."""

import numpy as np
import pytest
import torch

from dsv4_matrix.cases import content, layout
from dsv4_matrix.modes import watch

ORDERS = ("shuffled", "interleaved", "reversed", "identity")


def live_locations(scenario, step):
    """Full locations of all positions of each request up to its last row, by the step's own table."""
    batch, logical = scenario.placements[step].batch, scenario.steps[step]
    table = scenario.placements[step].req_to_token
    ends = [prefix + rows for prefix, rows in zip(logical.prefix_lens, logical.row_counts, strict=True)]
    rows = batch.req_pool_indices.tolist()
    return [table[row, :end].long() for row, end in zip(rows, ends, strict=True)]


@pytest.mark.parametrize("order", ORDERS)
def test_locations_keep_the_offset_in_the_page_and_are_disjoint(make, order):
    scenario = make(4, "eager", "extend", (700, 3, 255), extend_lens=(70, 10, 2), pages=order)
    locations = live_locations(scenario, 0)
    for location in locations:
        assert torch.equal(location % 256, torch.arange(len(location)) % 256)
    pages = [set((location // 256).tolist()) for location in locations]
    assert not set.intersection(*pages)
    assert 0 not in set.union(*pages)


@pytest.mark.parametrize("order", ORDERS)
def test_page_order(make, order):
    scenario = make(0, "eager", "decode", (1500, 1400), pages=order)
    first, second = [(location[::256] // 256).tolist() for location in live_locations(scenario, 0)]
    steps = np.diff(first + second)
    if order == "identity":
        assert (steps > 0).all()
    elif order == "reversed":
        assert (steps < 0).all()
    elif order == "interleaved":
        assert min(first) < min(second) < max(first) < max(second)
    else:
        assert (steps > 0).any()
        assert (steps < 0).any()


def test_slots_are_a_permutation_away_from_the_dummy_page(make):
    scenario = make(0, "eager", "decode", (300, 40), swa_page_size=128)
    mapping = scenario.runner.full_to_swa_index_mapping
    live = torch.cat(live_locations(scenario, 0))
    slots = mapping[live]
    assert len(slots.unique()) == len(live)
    assert int(slots.min()) >= 128
    assert int(slots.max()) < scenario.runner.num_swa_pages * 128
    assert (slots.diff() != 1).float().mean() > 0.9
    assert mapping[0] == 0
    assert mapping[-1] == -1
    assert len(mapping) == scenario.runner.num_pages * 256 + 1


def test_beyond_its_length_a_request_points_into_a_trap_that_nobody_writes(make):
    scenario = make(4, "eager", "decode", (300, 40))
    live = live_locations(scenario, 0)
    beyond = [
        scenario.runner.req_to_token[row, len(location) :].long()
        for row, location in zip(scenario.placements[0].batch.req_pool_indices.tolist(), live, strict=True)
    ]
    trap = {page for location in beyond for page in (location // 256).tolist()}
    assert len(trap) == 1
    assert trap.isdisjoint((torch.cat(live) // 256).tolist())
    slots = scenario.runner.full_to_swa_index_mapping[beyond[0]]
    assert int(slots.min()) > 0
    assert not set(slots.tolist()) & set(scenario.runner.full_to_swa_index_mapping[torch.cat(live)].tolist())


def test_request_rows_are_not_the_identity_and_row_0_is_the_pads(make):
    scenario = make(0, "eager", "decode", tuple(range(1, 9)))
    rows = scenario.placements[0].batch.req_pool_indices
    assert 0 not in rows.tolist()
    assert rows.tolist() != sorted(rows.tolist())
    assert not scenario.runner.req_to_token[0].any()


@pytest.mark.parametrize("longest", [5, 255, 256, 70000])
def test_context_capacity_grows_with_the_longest_request(make, longest):
    context = make(0, "eager", "decode", (longest,), history="window").runner.req_to_token.shape[1]
    assert context % 256 == 0
    assert longest + 2 <= context <= longest + 2 + 256


def test_window_history_leaves_older_tokens_freed(make):
    scenario = make(128, "eager", "decode", (400,), history="window")
    location = live_locations(scenario, 0)[0]
    slots = scenario.runner.full_to_swa_index_mapping[location]
    assert not slots[: 400 - 127].any()
    assert (slots[400 - 127 :] > 0).all()
    assert torch.equal(scenario.placements[0].history_loc, location[400 - 127 : 400])
    # Compressed entries outlive the window.
    assert torch.equal(scenario.placements[0].entry_loc, location[127:400:128])


def test_replays_have_tables_of_their_own_and_preempted_requests_keep_their_slots(make):
    scenario = make(0, "cg-decode", "decode", (60,), replays=((70, 80), ()))
    first, second, idle = scenario.placements
    old = torch.cat(live_locations(scenario, 0))
    assert torch.equal(second.mapping[old], first.mapping[old])
    assert torch.equal(idle.mapping[old], first.mapping[old])
    new = torch.cat(live_locations(scenario, 1))
    assert not first.mapping[new].any()
    assert not set(second.mapping[new].tolist()) & set(second.mapping[old].tolist())
    assert idle.batch.batch_size == 0


def test_freed_slots_and_pages_go_to_the_newcomer(make):
    scenario = make(4, "verify-eager", "target-verify", (253,), extend_lens=(6,), accept_lens=(1,), reuse="freed")
    verify, follow = scenario.placements
    rejected = verify.batch.out_cache_loc[1:]
    slots = set(verify.mapping[rejected].tolist())
    own, newcomer = live_locations(scenario, 1)
    assert slots <= set(follow.mapping[newcomer[:-1]].tolist())
    assert not slots & set(follow.mapping[own].tolist())
    assert int(rejected[-1]) // 256 in (newcomer // 256).tolist()
    # Accepted tokens stay where they are, under the same slots.
    kept = torch.cat([verify.history_loc, verify.batch.out_cache_loc[:1]])
    assert torch.equal(own[:-1], kept)
    assert torch.equal(verify.mapping[kept], follow.mapping[kept])


def test_next_step_writes_the_rejected_slot_again(make):
    scenario = make(0, "verify-eager", "target-verify", (20,), extend_lens=(4,), accept_lens=(2,))
    verify, follow = scenario.placements
    assert follow.batch.out_cache_loc.tolist() == verify.batch.out_cache_loc[2:3].tolist()
    assert torch.equal(verify.mapping[verify.batch.out_cache_loc[2:3]], follow.mapping[follow.batch.out_cache_loc])
    assert not follow.history_loc.numel()


@pytest.mark.parametrize(("ratio", "pages", "bytes_per_page"), [(0, "num_swa_pages", 149760), (4, "num_pages", 37440)])
def test_a_large_pool_is_beyond_32_bit_offsets_with_live_pages_at_its_end(make, ratio, pages, bytes_per_page):
    runner = make(ratio, "eager", "decode", (40,), large_pool=True).runner
    count = getattr(runner, pages)
    assert count * bytes_per_page > 2**31
    if ratio:
        live = int(runner.req_to_token[1:].min()) // 256
    else:
        live = int(runner.full_to_swa_index_mapping[1:-1].max()) // 256
    assert live * bytes_per_page > 2**31 - 8 * bytes_per_page


def test_an_unknown_page_order_is_refused(make):
    with pytest.raises(ValueError, match="interleaved"):
        make(0, "eager", "decode", (4,), pages="sorted")


def test_geometry_is_the_declarations(matrix):
    assert matrix.geometry.page_size == layout.PAGE_SIZE
    assert matrix.geometry.window == layout.WINDOW
    assert matrix.geometry.head_dim == content.HEAD_DIM
    assert matrix.geometry.bytes_per_token == watch.ENTRY_BYTES
