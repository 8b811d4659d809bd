# ruff: noqa: N803, RUF059 - constexpr names are upper case, and Gluon compiles a subset of Python
"""The producer of the Hopper kernel: packed rows gathered, decoded in registers and left in shared memory as bf16."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from dsv4_triton.hopper_items import item_lengths, item_place, item_span, offset_of
from dsv4_triton.hopper_layouts import BLOCK, ROPE_WORDS, ROWS, STAGES, SWIZZLED_WORDS, TOP_BITS, WORDS


@gluon.jit
def _decode(words, first, second):
    """Four e4m3 bytes a word, times a scale in two factors -> two words of bf16 pairs.

    ``s eeee mmm`` placed as ``s 0000eeee mmm0000`` is the bf16 value times 2**-120, subnormals included. ``prmt``
    spreads each byte over a half word behind eight copies of its sign.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        prmt.b32 a, $2, 0, 0x9180;
        prmt.b32 b, $2, 0, 0xB3A2;
        shl.b32 a, a, 4;
        shl.b32 b, b, 4;
        and.b32 a, a, 0x87f087f0;
        and.b32 b, b, 0x87f087f0;
        mul.rn.bf16x2 a, a, $3;
        mul.rn.bf16x2 b, b, $3;
        mul.rn.bf16x2 $0, a, $4;
        mul.rn.bf16x2 $1, b, $4;
        }""",
        "=&r,=&r,r,r,r",
        [words, first, second],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _scale(scales, OFF: gl.constexpr, GROUPS: gl.constexpr):
    """A row's eight scale bytes -> the two factors of ``_decode`` for GROUPS groups from byte column OFF.

    The product is 2**(byte - 127) times the 2**120 that ``_decode`` owes. Byte 135 and above exceed bf16 in one factor.
    """
    group = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))
    shift = (8 * (gl.expand_dims(group, 0) + OFF // 64)).to(gl.int64)
    byte = ((gl.expand_dims(scales, 1) >> shift) & 255).to(gl.int32)
    first = gl.where(byte == 255, 0x7FC0, (gl.minimum(byte, 134) + 120) << 7)
    second = (gl.maximum(byte, 134) - 7) << 7
    return first | (first << 16), second | (second << 16)


@gluon.jit
def _raw(base, offsets, valid, OFF: gl.constexpr, GROUPS: gl.constexpr):
    """64 * GROUPS bytes from byte OFF of each row: words ``[BLOCK, GROUPS, 16]``, zero for rows that do not count."""
    group = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))
    word = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))
    column = gl.expand_dims(gl.expand_dims(group, 0), 2) * 16 + gl.expand_dims(gl.expand_dims(word, 0), 1) + OFF // 4
    at = base + (gl.expand_dims(gl.expand_dims(offsets, 1), 2).to(gl.int64) * 4 + column)
    return gl.load(at, mask=gl.expand_dims(gl.expand_dims(valid, 1), 2), other=0)


@gluon.jit
def _put(tile, words, scales, OFF: gl.constexpr, GROUPS: gl.constexpr):
    """Decode words into the bf16 columns of ``tile``; returns ``[BLOCK, 4]``, bit 7 of a byte set where one was NaN."""
    first, second = _scale(scales, OFF, GROUPS)
    first, words = gl.broadcast(gl.expand_dims(first, 2), words)
    second, words = gl.broadcast(gl.expand_dims(second, 2), words)
    low, high = _decode(words, first, second)
    _words(tile, GROUPS * 32).store(gl.reshape(gl.join(low, high), [BLOCK, GROUPS * 32]))
    # (byte & 0x7f) + 1 carries into bit 7 for 0x7f and 0xff only
    carries = (words & 0x7F7F7F7F) + 0x01010101
    return gl.reduce_or(gl.reduce_or(gl.reshape(carries, [BLOCK, GROUPS, 4, 4]), 3), 1)


@gluon.jit
def _words(tile, WIDTH: gl.constexpr):
    """A tile of bf16 pairs as 32-bit words."""
    return tile._reinterpret(gl.int32, [BLOCK, WIDTH], SWIZZLED_WORDS)


@gluon.jit
def _slots(at, n, extra, block):
    """A block of indices, -1 beyond the list's length: one path for both lists by scalar selects."""
    index, extra_index = at
    main_blocks = (n + BLOCK - 1) // BLOCK
    main = block < main_blocks
    key = gl.where(main, block, block - main_blocks) * BLOCK + gl.arange(0, BLOCK, ROWS)
    return gl.load(gl.where(main, index, extra_index) + key, mask=key < gl.where(main, n, extra), other=-1)


@gluon.jit
def _locate(lists, n, block, slot):
    """Where the keys of a block are (list's words, offset of each key), their scale bytes, and which of them count."""
    cache, extra_cache, shift, extra_shift, stride, extra_stride, capacity, extra_capacity = lists
    main = block < (n + BLOCK - 1) // BLOCK
    # unsigned, so that negative indices exceed every capacity; addresses of invalid slots are formed but never read
    valid = slot.to(gl.uint32, bitcast=True) < gl.where(main, capacity, extra_capacity).to(gl.uint32)
    bits = gl.where(main, shift, extra_shift)
    at_page = slot >> bits
    entry = slot - (at_page << bits)
    start = at_page * gl.where(main, stride, extra_stride)  # in pieces of 16 bytes: 32 bits reach 32 GiB
    base = gl.where(main, cache, extra_cache)
    scale_base = base.to(gl.pointer_type(gl.int64), bitcast=True)
    scales = gl.load(scale_base + (start.to(gl.int64) * 2 + ((72 << bits) + entry)), mask=valid, other=0)
    return base, start + entry * 36, scales, valid


@gluon.jit
def _fetch(place):
    """Raw bytes of a block: words of groups 0 and 1, 2 and 3, 4 and 5, and 6."""
    base, offsets, scales, valid = place
    a = _raw(base, offsets, valid, 0, 2)
    b = _raw(base, offsets, valid, 128, 2)
    c = _raw(base, offsets, valid, 256, 2)
    return a, b, c, _raw(base, offsets, valid, 384, 1)


@gluon.jit
def _copy_rope(tile, place, full):
    """The rope needs no decoding: bytes on their way into ``tile``, which ``full`` waits for; zeros for other rows."""
    base, offsets, scales, valid = place
    offsets = gl.convert_layout(offsets, gl.SliceLayout(1, ROPE_WORDS), assert_trivial=True)
    valid = gl.convert_layout(valid, gl.SliceLayout(1, ROPE_WORDS), assert_trivial=True)
    word = gl.arange(0, 32, gl.SliceLayout(0, ROPE_WORDS)) + 112
    pointers = base + (gl.expand_dims(offsets, 1).to(gl.int64) * 4 + gl.expand_dims(word, 0))
    async_copy.async_copy_global_to_shared(_words(tile, 32), pointers, mask=gl.expand_dims(valid, 1))
    async_copy.mbarrier_arrive(full)


@gluon.jit
def producer(
    rows, lists, indices, keys, bars, items,
    SPLIT: gl.constexpr, HEAD_BLOCKS: gl.constexpr, SPLIT_BLOCKS: gl.constexpr,
):  # fmt: skip
    index, extra_index, i_b, i_s, e_b, e_s = indices
    bias = keys[5]
    full, empty = bars
    done = 0  # blocks of all items so far: stage and phase of the next one
    step = gl.num_programs(0)
    for item in range(gl.program_id(0), items, step):
        local, request, row, head_block, split = item_place(rows, item, SPLIT, HEAD_BLOCKS)
        n, extra = item_lengths(rows, item, SPLIT, HEAD_BLOCKS)
        first, count, splits = item_span(n, extra, split, SPLIT, SPLIT_BLOCKS)
        at = (index + offset_of(request, i_b, row, i_s), extra_index + offset_of(request, e_b, row, e_s))
        where = _locate(lists, n, first, _slots(at, n, extra, first))
        a, b, c, d = _fetch(where)
        slot = _slots(at, n, extra, first + 1)
        for i in range(first, first + count):
            stage = done % STAGES
            mbarrier.wait(empty.index(stage), ((done // STAGES) & 1) ^ 1)
            _copy_rope(keys[4].index(stage), where, full.index(stage))
            scales = where[2]
            flags = _put(keys[0].index(stage), a, scales, 0, 2)
            flags |= _put(keys[1].index(stage), b, scales, 128, 2)
            flags |= _put(keys[2].index(stage), c, scales, 256, 2)
            flags |= _put(keys[3].index(stage), d, scales, 384, 1)
            poisoned = gl.convert_layout(gl.reduce_or(flags, 1), ROWS) & TOP_BITS
            value = gl.where(poisoned != 0, float("nan"), 0.0)
            bias.index(stage).store(gl.where(where[3], value, float("-inf")))
            mbarrier.arrive(full.index(stage), count=1)
            where = _locate(lists, n, i + 1, slot)
            a, b, c, d = _fetch(where)
            slot = _slots(at, n, extra, i + 2)
            done += 1
