"""After a verify the next step reads nothing of a rejected draft: every acceptance, draft count and position.

Exhaustive over the real metadata kernels. Caches are arrays of names: what each slot would hold is written where the
metadata says and read where it says, so that a stale slot or entry shows as a name that is not the committed token's.
"""

from __future__ import annotations

from dataclasses import dataclass

import dsv4_reference
import numpy as np
import pytest
import torch
import triton
from dsv4_triton import metadata_kernels
from dsv4_triton.metadata_kernels import build_attn_metadata, write_c4_selection
from dsv4_triton.numerics import INTERPRETED
from dsv4_triton.rows import eager_layout

#: Every position modulo 128, and with it modulo 4; the window is full and a page ends among them.
STARTS = range(130, 258)
DRAFTS = range(2, 9)
RATIOS = (4, 128)
TOPK = 512
NOBODY, REJECTED = -1, -2


@dataclass(frozen=True)
class Sweep:
    """One request for each (start, drafts, accepted): a chain of ``drafts`` rows at ``start``, of which some stay."""

    start: np.ndarray
    drafts: np.ndarray
    accepted: np.ndarray

    @property
    def request(self) -> np.ndarray:
        return np.arange(len(self.start))


def sweep(drafts: range) -> Sweep:
    cells = [(start, n, accepted) for n in drafts for start in STARTS for accepted in range(1, n + 1)]
    return Sweep(*np.array(cells, np.int64).T)


class NamedCaches:
    """What every slot holds, by name: ``request * 1024 + position`` of a committed token, or of an entry's last one."""

    def __init__(self, world, requests: np.ndarray, start: np.ndarray) -> None:
        self.world = world
        table, runner = world.table.astype(np.int64), world.runner
        self.swa = np.full(int(world.mapping.max()) + 1, NOBODY)
        self.entries = {ratio: np.full(runner.num_pages * 256 // ratio, NOBODY) for ratio in RATIOS}
        position = np.arange(int(start.max()))
        held = position[None, :] < start[:, None]
        names = requests[:, None] * 1024 + position
        loc = table[requests][:, : len(position)]
        self.swa[world.mapping[loc[held]]] = names[held]
        for ratio, pool in self.entries.items():
            last = held & (position % ratio == ratio - 1)[None, :]
            # an entry is committed if its last token is
            pool[loc[last] // ratio] = names[last]

    def store(self, core, names: np.ndarray) -> None:
        """One step's rows, at the locations that the metadata gives them."""
        self.swa[core.swa_out_cache_loc.cpu().numpy()] = names
        for ratio, pool in self.entries.items():
            slots = getattr(core, f"c{ratio}_out_loc").cpu().numpy()
            pool[slots[slots >= 0]] = names[slots >= 0]

    def read(self, core) -> dict[int, np.ndarray]:
        """Names that each row attends, sorted, per ratio (0: the window)."""

        def names(pool, indices, lengths):
            indices, lengths = indices.cpu().numpy(), lengths.cpu().numpy()
            seen = (np.arange(indices.shape[1]) < lengths[:, None]) & (indices >= 0)
            return np.sort(np.where(seen, pool[np.where(seen, indices, 0)], NOBODY), 1)

        return {
            0: names(self.swa, core.swa_page_indices, core.swa_topk_lengths),
            4: names(self.entries[4], core.c4_sparse_page_indices, core.c4_sparse_topk_lengths),
            128: names(self.entries[128], core.c128_page_indices, core.c128_topk_lengths_clamp1),
        }


def metadata(world, batch):
    """The backend's metadata of ``batch``, with an indexer that offers every entry there could be."""
    runner = world.runner
    layout = eager_layout(batch, runner.req_to_token.shape[1], runner.speculative_num_draft_tokens)
    core = build_attn_metadata(layout, runner.req_to_token, runner.full_to_swa_index_mapping, TOPK)
    offered = torch.arange(TOPK, dtype=torch.int32, device=runner.device).expand(core.rows, TOPK)
    write_c4_selection(core, offered)
    return core


def should_read(requests: np.ndarray, positions: np.ndarray) -> dict[int, np.ndarray]:
    """The same from the reference, which knows positions only: what a run that never speculated reads."""
    where = torch.from_numpy(positions)
    offered = torch.arange(TOPK).expand(len(positions), TOPK)
    found = {0: dsv4_reference.visible(0, where)[0]}
    found |= {ratio: dsv4_reference.visible(ratio, where, offered)[1] for ratio in RATIOS}
    names = {}
    for ratio, ids in found.items():
        last = ids.numpy() if ratio == 0 else ids.numpy() * ratio + ratio - 1
        names[ratio] = np.sort(np.where(ids.numpy() >= 0, requests[:, None] * 1024 + last, NOBODY), 1)
    return names


def strangers(got: np.ndarray, want: np.ndarray) -> list[int]:
    """Rows that read anything but what they should; widths differ by absent columns, which sort first."""
    width = max(got.shape[1], want.shape[1])
    got, want = (np.pad(a, ((0, 0), (width - a.shape[1], 0)), constant_values=NOBODY) for a in (got, want))
    return np.flatnonzero((got != want).any(1)).tolist()


def verify(world, caches: NamedCaches, cells: Sweep, *, ragged: bool) -> None:
    """The chain; rejected rows leave a name that nobody may read."""
    batch, rows = world.batch(
        "target_verify", cells.start.tolist(), cells.drafts.tolist(), requests=cells.request.tolist(), ragged=ragged
    )
    names = rows.request * 1024 + rows.position
    kept = rows.position < np.repeat(cells.start + cells.accepted, cells.drafts)
    caches.store(metadata(world, batch), np.where(kept, names, REJECTED))


def next_step(world, caches: NamedCaches, cells: Sweep, mode: str, spoil=None) -> dict[int, list[int]]:
    """A decode, or another chain of as many drafts, behind the accepted ones: rows that read a stranger."""
    counts = cells.drafts if mode == "target_verify" else np.ones_like(cells.drafts)
    prefixes, requests = (cells.start + cells.accepted).tolist(), cells.request.tolist()
    batch, rows = world.batch(mode, prefixes, counts.tolist(), requests=requests, ragged=len(set(counts)) > 1)
    core = metadata(world, batch)
    if spoil:
        spoil(core)
    caches.store(core, rows.request * 1024 + rows.position)
    want = should_read(rows.request, rows.position)
    return {ratio: strangers(names, want[ratio]) for ratio, names in caches.read(core).items()}


@pytest.fixture(scope="module")
def served(named_world):
    """``served(cells)``: a world of one request a cell, and caches with the requests' history."""

    def make(cells: Sweep):
        world = named_world("after verify", [300] * len(cells.start), num_heads=16)
        return world, NamedCaches(world, cells.request, cells.start)

    return make


@pytest.fixture(autouse=True)
def large_blocks(monkeypatch):
    """The interpreter pays for programs, not for elements; how rows are dealt to programs is tested elsewhere."""
    if INTERPRETED.value:
        monkeypatch.setattr(metadata_kernels, "rows_per_program", lambda rows: min(1024, triton.next_power_of_2(rows)))


@pytest.mark.parametrize("after", ["decode", "target_verify"])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_every_acceptance_at_every_position(served, drafts, after):
    cells = sweep(range(drafts, drafts + 1))
    world, caches = served(cells)
    verify(world, caches, cells, ragged=False)
    assert (caches.swa == REJECTED).sum() == (cells.drafts - cells.accepted).sum()
    assert next_step(world, caches, cells, after) == {0: [], 4: [], 128: []}


def test_every_acceptance_of_ragged_chains(served):
    """All draft counts in one batch, neighbours of different width."""
    cells = sweep(DRAFTS)
    order = np.random.default_rng(1).permutation(len(cells.start))[:1024]
    cells = Sweep(cells.start[order], cells.drafts[order], cells.accepted[order])
    world, caches = served(cells)
    verify(world, caches, cells, ragged=True)
    assert next_step(world, caches, cells, "target_verify") == {0: [], 4: [], 128: []}


def entries_not_written_again(core) -> None:
    core.c4_out_loc.fill_(-1)
    core.c128_out_loc.fill_(-1)


def one_token_too_many(core) -> None:
    core.swa_page_indices[:, 1:] = core.swa_page_indices[:, :-1].clone()
    core.swa_page_indices[:, 0] = core.swa_page_indices[:, 4]


def an_entry_early(core) -> None:
    core.c128_page_indices[:, 1] = core.c128_page_indices[:, 0] + 1
    core.c128_topk_lengths_clamp1.fill_(2)


@pytest.mark.parametrize(
    ("spoil", "ratios"),
    [(entries_not_written_again, {4, 128}), (one_token_too_many, {0}), (an_entry_early, {128})],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_stranger_is_seen(served, spoil, ratios):
    cells = sweep(range(3, 4))
    world, caches = served(cells)
    verify(world, caches, cells, ragged=False)
    seen = next_step(world, caches, cells, "decode", spoil)
    assert {ratio for ratio, rows in seen.items() if rows} == ratios
