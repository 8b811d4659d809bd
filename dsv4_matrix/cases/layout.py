"""Where a case's bytes lie: pages, SWA slots and the scheduler's tables, unlike the identity in every way allowed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dsv4_matrix.cases.batch import DRAFT_RUNNER, StepPlan
from dsv4_matrix.cases.streams import stream
from dsv4_matrix.declaration.model import Variant

PAGE_SIZE = 256
WINDOW = 128
#: Bytes a page of the SWA pool (256 tokens) and of the C4 pool, rounded up to 576: spec of the packed format.
_SWA_PAGE_BYTES = {256: 149760, 128: 74880}
_C4_PAGE_BYTES = 37440
#: A pool that 32-bit byte offsets cannot address.
_LARGE_POOL_BYTES = (1 << 31) + (1 << 26)
#: Pages that nobody owns, so that a stray page id is poison and not another request.
_SPARE_PAGES = 2
_SPARE_ROWS = 2

IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
BoolArray = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


@dataclass(frozen=True)
class Tables:
    """The scheduler's view during one group of steps.

    Attributes:
        rows: row of ``req_to_token`` of each live request.
        locations: full location of each position of each live request, int64 ``[capacity]``.
        resident: bool ``[capacity]``, positions that have an SWA slot; the others were freed behind the window.
        req_to_token: int32 ``[max_requests, max_context_len]``.
        mapping: int64 ``[num_pages * 256 + 1]``, full location to SWA slot; also of requests preempted since an
            earlier group.
    """

    rows: dict[int, int]
    locations: dict[int, IntArray]
    resident: dict[int, BoolArray]
    req_to_token: Tensor
    mapping: Tensor


@dataclass(frozen=True)
class Layout:
    """Pool sizes and one ``Tables`` a group."""

    num_pages: int
    num_swa_pages: int
    max_context_len: int
    trap_page: int
    groups: tuple[Tables, ...]


@dataclass(frozen=True)
class _Live:
    """A request while one group runs: what is allocated to it, and the first position whose K must be in the pool."""

    capacity: int
    first_needed: int
    rejected: tuple[int, int]


def lay_out(mode: str, variant: Variant, plans: tuple[StepPlan, ...], ratio: int, seed: int, device: str) -> Layout:
    """Give every request pages, slots and a row. See ``Tables``; raises nothing: any plan fits, pools grow with it."""
    groups = _live_requests(mode, variant, plans)
    pages, page_count = _allocate_pages(variant, groups, seed)
    num_pages = 1 + page_count + 1 + _SPARE_PAGES
    if variant.large_pool and ratio == 4:
        num_pages = max(num_pages, _LARGE_POOL_BYTES // _C4_PAGE_BYTES)
    # Compact page numbers count from 0; live pages lie at the far end of the pool, the trap page somewhere among them.
    first_page = num_pages - page_count - 1
    trap_rank = int(stream(seed, "trap").integers(page_count + 1))
    order = _page_ids(variant.pages, page_count + 1, trap_rank, seed) + first_page
    trap_page, live_pages = int(order[-1]), order[:-1]

    slots, slot_count = _allocate_slots(variant, groups)
    slot_count += PAGE_SIZE
    swa_page = variant.swa_page_size
    live_swa_pages = -(-slot_count // swa_page) + 1
    num_swa_pages = 1 + live_swa_pages + 1
    if variant.large_pool and ratio != 4:
        num_swa_pages = max(num_swa_pages, _LARGE_POOL_BYTES // _SWA_PAGE_BYTES[swa_page])
    first_slot = (num_swa_pages - live_swa_pages) * swa_page
    slot_ids = stream(seed, "swa slots").permutation(live_swa_pages * swa_page) + first_slot

    longest = max((live.capacity for group in groups for live in group.values()), default=0)
    context = -(-(longest + 1) // PAGE_SIZE) * PAGE_SIZE
    table_rows = 1 + max(len(group) for group in groups) + _SPARE_ROWS
    tables = []
    # A request that is not in a group's batches was preempted, not finished: its slots stay mapped, so that what an
    # earlier batch left behind (a stale location, a stale pad row) still has a live key to hit.
    preempted: dict[int, tuple[IntArray, IntArray]] = {}
    for number, group in enumerate(groups):
        row_ids = 1 + stream(seed, "rows", number).permutation(table_rows - 1)
        rows = {request: int(row) for request, row in zip(group, row_ids, strict=False)}
        locations: dict[int, IntArray] = {}
        resident: dict[int, BoolArray] = {}
        table = np.tile(trap_page * PAGE_SIZE + np.arange(context, dtype=np.int32) % PAGE_SIZE, (table_rows, 1))
        table[0] = 0
        mapped = [held for request, held in preempted.items() if request not in group]
        for request, live in group.items():
            position = np.arange(live.capacity)
            own = live_pages[pages[number][request]]
            location = own[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
            table[rows[request], : live.capacity] = location
            locations[request] = location
            held = slots[number][request]
            resident[request] = held >= 0
            preempted[request] = (location[held >= 0], slot_ids[held[held >= 0]])
            mapped.append(preempted[request])
        mapped.append((trap_page * PAGE_SIZE + np.arange(PAGE_SIZE), slot_ids[slot_count - PAGE_SIZE : slot_count]))
        mapping = _mapping(mapped, num_pages * PAGE_SIZE, device)
        tables.append(Tables(rows, locations, resident, torch.from_numpy(table).to(device), mapping))
    return Layout(num_pages, num_swa_pages, context, trap_page, tuple(tables))


def _live_requests(mode: str, variant: Variant, plans: tuple[StepPlan, ...]) -> list[dict[int, _Live]]:
    """Per group, the live requests. A request that goes on keeps its allocation for what stayed committed."""
    groups: list[dict[int, _Live]] = [{} for _ in range(plans[-1].group + 1)]
    first_seen: dict[int, int] = {}
    for plan in plans:
        for span in plan.spans:
            first = first_seen.setdefault(span.request, span.prefix)
            needed = max(0, first - WINDOW + 1) if variant.history == "window" else 0
            # A draft chain is scheduled at once: a location for each of its steps, the last (sampled) one included.
            end = first + variant.num_steps if mode == DRAFT_RUNNER else span.total
            live = groups[plan.group].get(span.request)
            rejected = (span.prefix + span.kept, span.total)
            capacity = max(end, live.capacity if live else 0)
            groups[plan.group][span.request] = _Live(capacity, needed, rejected)
    return groups


def _allocate_pages(
    variant: Variant, groups: list[dict[int, _Live]], seed: int
) -> tuple[list[dict[int, IntArray]], int]:
    """Compact page numbers of each (group, request); pages of rejected drafts go to newcomers under reuse ``freed``."""
    owned: dict[int, IntArray] = {}
    result: list[dict[int, IntArray]] = []
    count = 0
    for group in groups:
        freed: list[int] = []
        if variant.reuse == "freed":
            for request in group:
                if request in owned:
                    keep = -(-group[request].capacity // PAGE_SIZE)
                    freed += owned[request][keep:].tolist()
                    owned[request] = owned[request][:keep]
        for request, live in group.items():
            have = owned.get(request, np.empty(0, np.int64))
            missing = -(-live.capacity // PAGE_SIZE) - len(have)
            # A newcomer's freed pages come last: its newest tokens and entries lie where the rejected ones lay.
            taken = freed[:missing] if not len(have) else []
            freed = freed[len(taken) :]
            fresh = np.arange(count, count + missing - len(taken))
            count += len(fresh)
            owned[request] = np.concatenate([have, fresh, np.array(taken, np.int64)])
        result.append({request: owned[request] for request in group})
    return result, count


def _allocate_slots(variant: Variant, groups: list[dict[int, _Live]]) -> tuple[list[dict[int, IntArray]], int]:
    """Compact SWA slot numbers of each (group, request), -1 where the window has moved on and the slot was freed."""
    owned: dict[int, IntArray] = {}
    previous: dict[int, _Live] = {}
    result: list[dict[int, IntArray]] = []
    count = 0
    for group in groups:
        freed: list[int] = []
        if variant.reuse == "freed":
            for request in group:
                if request in owned:
                    start, end = previous[request].rejected
                    freed += owned[request][start:end].tolist()
                    owned[request] = owned[request][:start]
        for request, live in group.items():
            old = owned.get(request)
            have = np.empty(0, np.int64) if old is None else old[: live.capacity]
            slots = np.full(live.capacity, -1, np.int64)
            slots[: len(have)] = have
            new = np.arange(max(len(have), live.first_needed), live.capacity)
            slots[new] = count + np.arange(len(new))
            count += len(new)
            if old is None and freed:
                # The newest committed tokens of the newcomer take over what the rejected drafts left behind.
                taken = min(len(freed), live.capacity - 1)
                slots[live.capacity - 1 - taken : live.capacity - 1] = freed[:taken]
                freed = freed[taken:]
            owned[request] = slots
            previous[request] = live
        result.append({request: owned[request] for request in group})
    return result, count


def _page_ids(order: str, count: int, trap_rank: int, seed: int) -> IntArray:
    """Ids 0 .. count - 1 in allocation order; the last one is the trap page."""
    ids = np.arange(count)
    live, trap = np.delete(ids, trap_rank), ids[trap_rank : trap_rank + 1]
    if order == "reversed":
        live = live[::-1]
    elif order == "interleaved":
        # Consecutive pages of one request lie a stride apart, with other requests' pages between them.
        live = np.concatenate([live[0::2], live[1::2]])
    elif order == "shuffled":
        live = stream(seed, "pages").permutation(live)
    elif order != "identity":
        raise ValueError(f"pages {order!r} is not one of shuffled, interleaved, reversed, identity")
    return np.concatenate([live, trap])


def _mapping(mapped: list[tuple[IntArray, IntArray]], size: int, device: str) -> Tensor:
    """Zero (the dummy slot) where nothing lives, as a scheduler leaves freed tokens; the last element is -1."""
    mapping = torch.zeros(size + 1, dtype=torch.int64, device=device)
    locations = torch.from_numpy(np.concatenate([location for location, _ in mapped])).to(device)
    mapping[locations] = torch.from_numpy(np.concatenate([slot for _, slot in mapped])).to(device)
    mapping[-1] = -1
    return mapping
