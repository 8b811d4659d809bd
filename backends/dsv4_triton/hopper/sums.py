# ruff: noqa: N803, RUF059, SIM102 - constexpr names are upper case, and Gluon compiles a subset of Python
"""The Hopper kernel's role ``sums``, twice: probabilities times keys, half of the columns each, and the output.

Sums wait most of the time, so one of the two also keeps the notes on where coming keys are. It is the default
partition, which has the kernel's arguments in constant memory: elsewhere they cost registers, and what does not fit
into registers goes to local memory, of which L1 holds next to nothing beside this kernel's shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4_triton.hopper.items import item_lengths, item_place, item_span, offset_of, unknown
from dsv4_triton.hopper.layouts import NOTED, PARTIAL_WORDS, PLACES, ROWS, SUMS
from dsv4_triton.hopper.notes import first_block, locate, next_block, note, slots_of
from dsv4_triton.hopper.softmax import finish


@gluon.jit
def _emit(
    out, place, acc, tile, splits, partial, partial_splits, heads, COLUMN: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """128 columns of an item: normalised bf16 through a tile of shared memory, or the bare sums of a split."""
    local, b, s, head_block, split = place
    base, o_b, o_s, o_h = out
    if SPLIT:
        if splits > 1:
            h = head_block * 64 + unknown(gl.arange(0, 64, gl.SliceLayout(1, SUMS)))
            row = ((local.to(gl.int64) * partial_splits + split) * heads + h) * PARTIAL_WORDS
            column = gl.arange(0, 128, gl.SliceLayout(0, SUMS)) + COLUMN
            gl.store(partial + (gl.expand_dims(row, 1) + gl.expand_dims(column, 0)), acc)
    tile.store(acc.to(gl.bfloat16))
    x = tile.load(ROWS)
    start = (offset_of(b, o_b, s, o_s) + head_block.to(gl.int64) * 64 * o_h) * 8 + COLUMN
    h = gl.expand_dims(unknown(gl.arange(0, 64, gl.SliceLayout(1, ROWS))), 1)
    pointers = base + start + (h * (o_h * 8) + gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, ROWS)), 0))
    if SPLIT:
        gl.store(pointers, x, mask=splits == 1)
    else:
        gl.store(pointers, x)


@gluon.jit
def sums(
    SIDE: gl.constexpr, out, lse, sink, rows, heads, partial, partial_splits, lists, indices, tiles, hand, notes, bars,
    items, SPLIT: gl.constexpr, HEAD_BLOCKS: gl.constexpr, SPLIT_BLOCKS: gl.constexpr,
):  # fmt: skip
    """Columns 0..255 (SIDE 0, which also has the lse) or 256..511 (SIDE 1, which also has the notes)."""
    probabilities, keeps, tops, totals = hand
    full, ready, empty, noted = bars
    lse_base, l_b, l_s, l_h = lse
    step = gl.num_programs(0)
    done = 0
    if SIDE == 1:
        # Three notes to begin with. All slots, then all scale bytes, so that each kind is waited for once.
        first_cursor = first_block(rows, indices, items, SPLIT, HEAD_BLOCKS, SPLIT_BLOCKS)
        second_cursor = next_block(rows, indices, first_cursor, items, SPLIT, HEAD_BLOCKS, SPLIT_BLOCKS)
        third_cursor = next_block(rows, indices, second_cursor, items, SPLIT, HEAD_BLOCKS, SPLIT_BLOCKS)
        slots, slots_2, slots_3 = (
            slots_of(first_cursor, PLACES),
            slots_of(second_cursor, PLACES),
            slots_of(third_cursor, PLACES),
        )
        located = locate(lists, first_cursor, slots, PLACES)
        located_2 = locate(lists, second_cursor, slots_2, PLACES)
        located_3 = locate(lists, third_cursor, slots_3, PLACES)
        note(notes, 0, located, first_cursor[0])
        mbarrier.arrive(noted.index(0), count=1)
        note(notes, 1, located_2, second_cursor[0])
        mbarrier.arrive(noted.index(1), count=1)
        note(notes, 2, located_3, third_cursor[0])
        mbarrier.arrive(noted.index(2), count=1)
        # Two more on their way: the scale bytes of one, the slots of the other.
        cursor = next_block(rows, indices, third_cursor, items, SPLIT, HEAD_BLOCKS, SPLIT_BLOCKS)
        located = locate(lists, cursor, slots_of(cursor, PLACES), PLACES)
        owner = cursor[0]
        cursor = next_block(rows, indices, cursor, items, SPLIT, HEAD_BLOCKS, SPLIT_BLOCKS)
        slots = slots_of(cursor, PLACES)
    n, extra = item_lengths(rows, gl.program_id(0), SPLIT, HEAD_BLOCKS)
    for item in range(gl.program_id(0), items, step):
        place = item_place(rows, item, SPLIT, HEAD_BLOCKS)
        local, b, s, head_block, split = place
        first, count, splits = item_span(n, extra, split, SPLIT, SPLIT_BLOCKS)
        h = head_block * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
        sinks = gl.load(sink + h, mask=(h >= 0) & ((rows[4] & 4) != 0), other=float("-inf"))
        n, extra = item_lengths(rows, gl.minimum(item + step, items - 1), SPLIT, HEAD_BLOCKS)
        if count > 0:
            acc_a = gl.zeros([64, 128], gl.float32, SUMS)
            acc_b = gl.zeros([64, 128], gl.float32, SUMS)
            total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SUMS))
            top = total
            for i in range(count):
                stage = done & 1
                if SIDE == 1:
                    # This entry held the block before this one, which is decoded, so it is free.
                    entry = (done + NOTED - 1) % NOTED
                    note(notes, entry, located, owner)
                    mbarrier.arrive(noted.index(entry), count=1)
                    located = locate(lists, cursor, slots, PLACES)
                    owner = cursor[0]
                    cursor = next_block(rows, indices, cursor, items, SPLIT, HEAD_BLOCKS, SPLIT_BLOCKS)
                    slots = slots_of(cursor, PLACES)
                mbarrier.wait(ready.index(stage), (done >> 1) & 1)
                fence_async_shared()
                keep = keeps.index(stage).load(gl.SliceLayout(1, SUMS))
                total = totals.index(stage).load(gl.SliceLayout(1, SUMS))
                top = tops.index(stage).load(gl.SliceLayout(1, SUMS))
                acc_a = acc_a * gl.expand_dims(keep, 1)
                acc_b = acc_b * gl.expand_dims(keep, 1)
                p = probabilities.index(stage)
                sums_a = warpgroup_mma(p, tiles[2 * SIDE].index(stage), acc_a, is_async=True)
                sums_b = warpgroup_mma(p, tiles[2 * SIDE + 1].index(stage), acc_b, is_async=True)
                acc_a, acc_b = warpgroup_mma_wait(0, deps=[sums_a, sums_b])
                mbarrier.arrive(empty.index(stage), count=1, pred=i + 1 < count)
                done += 1
            factor, row_lse = finish(top, total, sinks)
            if SPLIT:
                factor = gl.where(splits > 1, 1.0, factor)
            if SIDE == 0:
                lse_at = lse_base + (offset_of(b, l_b, s, l_s) + h.to(gl.int64) * l_h)
                if SPLIT:
                    gl.store(lse_at, row_lse, mask=(h >= 0) & (splits == 1))
                    row = ((local.to(gl.int64) * partial_splits + split) * heads + h) * PARTIAL_WORDS
                    gl.store(partial + (row + 512), top, mask=(h >= 0) & (splits > 1))
                    gl.store(partial + (row + 513), total, mask=(h >= 0) & (splits > 1))
                else:
                    gl.store(lse_at, row_lse)
            acc_a = acc_a * gl.expand_dims(factor, 1)
            acc_b = acc_b * gl.expand_dims(factor, 1)
            last = (done - 1) & 1
            _emit(
                out, place, acc_a, tiles[2 * SIDE].index(last), splits, partial, partial_splits, heads,
                256 * SIDE, SPLIT,
            )  # fmt: skip
            _emit(
                out, place, acc_b, tiles[2 * SIDE + 1].index(last), splits, partial, partial_splits, heads,
                256 * SIDE + 128, SPLIT,
            )  # fmt: skip
            mbarrier.arrive(empty.index(last), count=1)
