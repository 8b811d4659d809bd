# ruff: noqa: N803, RUF059 - constexpr names are upper case, and Gluon compiles a subset of Python
"""Notes on the Hopper kernel's blocks of keys, some blocks ahead: where keys are, and how their bytes are scaled."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4_triton.hopper.items import item_lengths, item_place, item_span, offset_of
from dsv4_triton.hopper.layouts import BLOCK, NOTES, ONE

#: scale bytes up to here need one factor
ONE_FACTOR = gl.constexpr(134)


@gluon.jit
def first_block(rows, indices, items, SPLIT: gl.constexpr, HEAD_BLOCKS: gl.constexpr, SPLIT_BLOCKS: gl.constexpr):
    """A cursor on the first block of this program: item, block of the item, first block, count, lengths, lists."""
    item = gl.program_id(0)
    n, extra = item_lengths(rows, item, SPLIT, HEAD_BLOCKS)
    local, request, row, head_block, split = item_place(rows, item, SPLIT, HEAD_BLOCKS)
    first, count, splits = item_span(n, extra, split, SPLIT, SPLIT_BLOCKS)
    index, extra_index = _lists(indices, request, row)
    return _settle(
        rows, indices, (item, item * 0, first, count, n, extra, index, extra_index), items,
        SPLIT, HEAD_BLOCKS, SPLIT_BLOCKS,
    )  # fmt: skip


@gluon.jit
def next_block(
    rows, indices, cursor, items, SPLIT: gl.constexpr, HEAD_BLOCKS: gl.constexpr, SPLIT_BLOCKS: gl.constexpr,
):  # fmt: skip
    """The cursor one block on. Behind the last block of all it is at an item that is none."""
    item, i, first, count, n, extra, index, extra_index = cursor
    return _settle(
        rows, indices, (item, i + 1, first, count, n, extra, index, extra_index), items,
        SPLIT, HEAD_BLOCKS, SPLIT_BLOCKS,
    )  # fmt: skip


@gluon.jit
def _settle(rows, indices, cursor, items, SPLIT: gl.constexpr, HEAD_BLOCKS: gl.constexpr, SPLIT_BLOCKS: gl.constexpr):
    item, i, first, count, n, extra, index, extra_index = cursor
    while (i >= count) & (item < items):
        i -= count
        item += gl.num_programs(0)
        held = gl.minimum(item, items - 1)
        n, extra = item_lengths(rows, held, SPLIT, HEAD_BLOCKS)
        local, request, row, head_block, split = item_place(rows, held, SPLIT, HEAD_BLOCKS)
        first, count, splits = item_span(n, extra, split, SPLIT, SPLIT_BLOCKS)
        index, extra_index = _lists(indices, request, row)
    return item, i, first, count, n, extra, index, extra_index


@gluon.jit
def _lists(indices, request, row):
    index, extra_index, i_b, i_s, e_b, e_s = indices
    return index + offset_of(request, i_b, row, i_s), extra_index + offset_of(request, e_b, row, e_s)


@gluon.jit
def slots_of(cursor, LAYOUT: gl.constexpr):
    """A block's indices; what stands in place of those beyond the list's length is for ``locate`` to leave out.

    No lane is masked off: a load that some lanes leave out is waited for at once.
    """
    item, i, first, count, n, extra, index, extra_index = cursor
    main, key, length = _keys_of(cursor, LAYOUT)
    return gl.load(gl.where(main, index, extra_index) + gl.maximum(gl.minimum(key, length - 1), 0))


@gluon.jit
def _keys_of(cursor, LAYOUT: gl.constexpr):
    """One path for both lists by scalar selects: whether it is the main list, places in the list, its length."""
    item, i, first, count, n, extra, index, extra_index = cursor
    main_blocks = (n + BLOCK - 1) // BLOCK
    block = first + i
    main = block < main_blocks
    key = gl.where(main, block, block - main_blocks) * BLOCK + gl.arange(0, BLOCK, LAYOUT)
    return main, key, gl.where(main, n, extra)


@gluon.jit
def locate(lists, cursor, slot, LAYOUT: gl.constexpr):
    """``address_of`` for a block's keys."""
    main, key, length = _keys_of(cursor, LAYOUT)
    return address_of(lists, slot, main, key < length)


@gluon.jit
def address_of(lists, slot, main, inside):
    """``place_of``, with the scale bytes of the keys in place of their addresses."""
    place, codes, valid = place_of(lists, slot, main, inside)
    return place, gl.load(codes), valid


@gluon.jit
def lists_of(
    cache, shift, stride, capacity, extra_cache, extra_shift, extra_stride, extra_capacity,
):  # fmt: skip
    """Both caches as the functions below take them."""
    words = cache.to(gl.pointer_type(gl.int32), bitcast=True)
    extra_words = extra_cache.to(gl.pointer_type(gl.int32), bitcast=True)
    return words, extra_words, shift, extra_shift, stride, extra_stride, capacity, extra_capacity


@gluon.jit
def entries_of(row, step, LAYOUT: gl.constexpr, KEYS: gl.constexpr):
    """Entries of a row's lists, KEYS at a time, whether they are of the first one, whether they are within its length.

    No lane is masked off: a load that some lanes leave out is waited for at once.
    """
    return entries_at(row, step * KEYS + gl.arange(0, KEYS, LAYOUT))


@gluon.jit
def entries_at(row, key):
    """``entries_of`` for keys by their number among those of the row's blocks."""
    n, extra, blocks, first, index, extra_index = row
    main_blocks = (n + BLOCK - 1) // BLOCK
    place = first * BLOCK + key
    main = place < main_blocks * BLOCK
    key = gl.where(main, place, place - main_blocks * BLOCK)
    length = gl.where(main, n, extra)
    inside = gl.maximum(gl.minimum(key, length - 1), 0)
    return gl.load(gl.where(main, index + inside, extra_index + inside)), main, key < length


@gluon.jit
def place_of(lists, slot, main, inside):
    """Addresses of keys as int64, pointers to their eight scale bytes each, which of them count.

    ``main``: whether they are of the first list, for all of them or for each; ``inside``: whether within its length.
    Keys that do not count have the address of slot 0, and become zeros by their factors.
    """
    cache, extra_cache, shift, extra_shift, stride, extra_stride, capacity, extra_capacity = lists
    # unsigned, so that negative indices exceed every capacity
    valid = slot.to(gl.uint32, bitcast=True) < gl.where(main, capacity, extra_capacity).to(gl.uint32)
    valid = valid & inside
    slot = gl.where(valid, slot, 0)
    bits = gl.where(main, shift, extra_shift)
    page = slot >> bits
    entry = slot - (page << bits)
    start = page * gl.where(main, stride, extra_stride)  # in pieces of 16 bytes: 32 bits reach 32 GiB
    base = gl.where(main, cache.to(gl.int64, bitcast=True), extra_cache.to(gl.int64, bitcast=True))
    codes = base + (start.to(gl.int64) * 2 + ((72 << bits) + entry)) * 8
    place = base + (start + entry * 36).to(gl.int64) * 16
    return place, codes.to(gl.pointer_type(gl.int64), bitcast=True), valid


@gluon.jit
def note(notes, entry, located, item):
    """Write down for ``gather`` what ``locate`` found of a block of an item."""
    place, codes, valid = located
    places, factors, fills, owners, large = notes
    places.index(entry).store(place)
    fills.index(entry).store(gl.where(valid, 0.0, float("-inf")))
    byte = _scale_bytes(codes)
    factors.index(entry).store(gl.permute(gl.where(gl.expand_dims(valid, 1), factors_of(byte), 0), (1, 0)))
    group = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, NOTES)), 0)
    beyond = gl.max(gl.max(gl.where((group < 7) & gl.expand_dims(valid, 1), byte, 0), 1), 0) > ONE_FACTOR
    large.index(entry).store(gl.full([1], 0, gl.int32, ONE) + beyond.to(gl.int32))
    owners.index(entry).store(gl.full([1], 0, gl.int32, ONE) + item)


@gluon.jit
def _scale_bytes(codes):
    """A key's eight scale bytes, one a group: int32 ``[BLOCK, 8]``, of which the last means nothing."""
    shift = gl.expand_dims(8 * gl.arange(0, 8, gl.SliceLayout(0, NOTES)), 0).to(gl.int64)
    return ((gl.expand_dims(codes, 1) >> shift) & 255).to(gl.int32)


@gluon.jit
def factors_of(byte):
    """Scale bytes -> the two factors of ``keys``, in one word.

    The product is 2**(byte - 127) times the 2**120 that decoding owes. Beyond ONE_FACTOR it exceeds bf16 in one factor.
    """
    first = gl.where(byte == 255, 0x7FC0, (gl.minimum(byte, ONE_FACTOR) + 120) << 7)
    second = (gl.maximum(byte, ONE_FACTOR) - 7) << 7
    return (first << 16) | second
