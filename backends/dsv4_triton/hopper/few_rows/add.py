# ruff: noqa: N803, RUF059 - constexpr names are upper case, and Gluon compiles a subset of Python
"""Few rows, the second of two kernels: softmax over all blocks of a row, weights times keys, a few columns a program.

It is launched beside the first one, and has decoded its columns of all keys of the row before that one is done. Three
roles of four warps do so; then two of them make weights of some blocks, for all programs of the row, and one adds up
(``weights``). A program waits for its neighbours, those with the other columns: the grid has no more programs than the
device has processors.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
)

from dsv4_triton.hopper.few_rows.weights import NUMBERS, SHORT, add_up, weigh_up
from dsv4_triton.hopper.items import offset_of, row_of, unknown
from dsv4_triton.hopper.keys import decoded
from dsv4_triton.hopper.layouts import (
    BLOCK,
    MOST_BLOCKS,
    PLAIN,
    PLAIN_2D,
    WORDS,
    WORDS_32,
    thread_barrier,
    wait_for_previous,
)
from dsv4_triton.hopper.notes import entries_at, factors_of, lists_of, place_of

FIRST = gl.constexpr(0)
SECOND = gl.constexpr(1)
THIRD = gl.constexpr(2)
#: [steps, keys], a key of each step a thread
NOTING = gl.constexpr(gl.BlockedLayout([8, 1], [1, 32], [1, 4], [1, 0]))


@gluon.jit
def _fill(TURN: gl.constexpr, row, lists, tiles, notes, slice_, filled, COLUMNS: gl.constexpr):
    """A role's third of the steps of keys into shared memory, every third one: all on their way at once.

    e4m3 lands where its own values will be. Notes are where keys are, and the factors of their scale; of rope, which
    keys count.
    """
    words: gl.constexpr = WORDS_32 if COLUMNS == 32 else WORDS
    of_words: gl.constexpr = gl.SliceLayout(1, words)
    keys: gl.constexpr = 4096 // COLUMNS
    quarter: gl.constexpr = COLUMNS // 4  # words of e4m3, and half of those of rope
    most: gl.constexpr = 512 // keys  # steps of a role
    places, factors = notes
    rope = 448 // COLUMNS
    steps = (row[2] * BLOCK + keys - 1) // keys
    step = gl.expand_dims(gl.arange(0, most, gl.SliceLayout(1, NOTING)), 1) * 3 + TURN
    entry, main, inside = entries_at(
        row, step * keys + gl.expand_dims(gl.arange(0, keys, gl.SliceLayout(0, NOTING)), 0)
    )
    # Mostly so. Without a branch the assembler waits for each entry before it asks for the next one.
    if unknown(row[2]) > 0:
        place, code, valid = place_of(lists, entry, main, inside)
        byte = gl.load(code.to(gl.pointer_type(gl.uint8), bitcast=True) + gl.minimum(slice_ * COLUMNS // 64, 6))
        places.index(TURN).store(place)
        if slice_ >= rope:
            factors.index(TURN).store(valid.to(gl.int32))
        thread_barrier()
        place_of_step = places._reinterpret(gl.int64, [places.shape[0] * most, keys], PLAIN)
        factor_of_step = factors._reinterpret(gl.int32, [factors.shape[0] * most, keys], PLAIN)
        first = TURN * most
        column = gl.expand_dims(gl.arange(0, quarter, gl.SliceLayout(0, words)), 0)
        if slice_ >= rope:
            for i in range(TURN, steps, 3):
                at = place_of_step.index(first + i // 3).load(of_words).to(gl.pointer_type(gl.int32), bitcast=True)
                source = gl.expand_dims(gl.multiple_of(at, 16), 1) + (column + (112 + (slice_ - rope) * (COLUMNS // 2)))
                mask = gl.expand_dims(factor_of_step.index(first + i // 3).load(of_words) != 0, 1)
                tile = tiles.index(i)
                async_copy.async_copy_global_to_shared(tile.slice(0, quarter, 1), source, mask=mask)
                async_copy.async_copy_global_to_shared(tile.slice(quarter, quarter, 1), source + quarter, mask=mask)
            async_copy.commit_group()
            async_copy.wait_group(0)
        else:
            raw = tiles._reinterpret(gl.int32, [2 * tiles.shape[0], keys, quarter], PLAIN_2D)
            for i in range(TURN, steps, 3):
                at = place_of_step.index(first + i // 3).load(of_words).to(gl.pointer_type(gl.int32), bitcast=True)
                source = gl.expand_dims(gl.multiple_of(at, 16), 1) + (column + slice_ * quarter)
                async_copy.async_copy_global_to_shared(raw.index(2 * i), source)
            async_copy.commit_group()
            factors.index(TURN).store(gl.where(valid, factors_of(byte.to(gl.int32)), 0))
            async_copy.wait_group(0)
            for i in range(TURN, steps, 3):
                x = raw.index(2 * i).load(words)
                factor = factor_of_step.index(first + i // 3).load(of_words)
                thread_barrier()
                pairs, flags = decoded(x, factor, x * 0, True)
                tiles.index(i).store(pairs)
        thread_barrier()
    mbarrier.arrive(filled, count=1)


@gluon.jit
def _weigh(
    TURN: gl.constexpr, row, lists, words, notes, slice_, makers, scores, tops, scale, made, count, near, filled,
    COLUMNS: gl.constexpr,
):  # fmt: skip
    """A role of four warps: keys, then weights."""
    _fill(TURN, row, lists, words, notes, slice_, filled, COLUMNS)
    wait_for_previous()
    weigh_up(TURN, 2 * slice_ + TURN, makers, row[2], scores, tops, scale, made, count, near)


@gluon.jit
def _add(
    output, half, row, lists, words, notes, slice_, tiles, made, count, near, filled,
    COLUMNS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """A role of four warps: keys, then sums."""
    _fill(THIRD, row, lists, words, notes, slice_, filled, COLUMNS)
    wait_for_previous()
    add_up(output, half, slice_, row[2], tiles, made, count, near, filled, SPLIT)


@gluon.jit(do_not_specialize=[
    "seq", "o_b", "o_s", "o_h", "l_b", "l_s", "l_h", "i_b", "i_s", "e_b", "e_s", "width", "extra_width", "given",
    "shift", "extra_shift", "stride", "extra_stride", "capacity", "extra_capacity", "row_blocks", "splits", "halves",
    "makers",
], do_not_specialize_on_alignment=[
    "lse", "partial", "sink", "index", "lengths", "extra_index", "extra_lengths",
])  # fmt: skip
def add_blocks(
    out, o_b, o_s, o_h, lse, l_b, l_s, l_h, sink, seq, row_blocks, splits, partial, halves,
    cache, shift, stride, capacity, index, i_b, i_s, lengths, width,
    extra_cache, extra_shift, extra_stride, extra_capacity, extra_index, e_b, e_s, extra_lengths, extra_width,
    given, scores, tops, scale, weights, numbers, counts, makers,
    SPLIT: gl.constexpr, COLUMNS: gl.constexpr, WEIGH_REGISTERS: gl.constexpr,
):  # fmt: skip
    """COLUMNS columns of the output of 64 heads of a row; the first program of these also has their lse.

    Arguments as ``score.score_blocks`` has them, and ``kernel.attend``. An item has MOST_BLOCKS blocks at most, whose
    keys are in shared memory beside weights of SHORT blocks. weights: bf16 ``[items * halves, row_blocks, 4096]``;
    numbers: fp32 ``[items * halves, row_blocks, NUMBERS, 64]``; counts: int32 ``[items * halves]``, zeros. Of the two
    roles a program that can make weights (``weights``), the first ``makers`` of 64 heads do.
    """
    slices: gl.constexpr = 512 // COLUMNS
    item = gl.program_id(0) // slices
    slice_ = gl.program_id(0) % slices
    number, half = item // halves, item % halves
    b, s, split, row_splits, held = row_of(
        number, seq, splits, (lengths, extra_lengths, width, extra_width, given),
        (index, extra_index, i_b, i_s, e_b, e_s), SPLIT, MOST_BLOCKS,
    )  # fmt: skip
    lists = lists_of(cache, shift, stride, capacity, extra_cache, extra_shift, extra_stride, extra_capacity)
    scores += item.to(gl.int64) * row_blocks * 4096
    tops += item.to(gl.int64) * row_blocks * 64
    made = (
        weights + item.to(gl.int64) * row_blocks * 4096,
        numbers + item.to(gl.int64) * row_blocks * (NUMBERS * 64),
    )
    count = counts + item
    output = (
        out + offset_of(b, o_b, s, o_s) * 8, o_h, lse + offset_of(b, l_b, s, l_s), l_h, sink, given,
        partial, number, halves * 64, split, row_splits,
    )  # fmt: skip
    swizzle: gl.constexpr = 2 * COLUMNS
    keys_a_step: gl.constexpr = 4096 // COLUMNS  # 16 bytes of e4m3 a thread
    tiles = gl.allocate_shared_memory(gl.bfloat16, [MOST_BLOCKS, BLOCK, COLUMNS], gl.NVMMASharedLayout(swizzle, 16, 2))
    words_of_tiles = tiles._reinterpret(
        gl.int32, [MOST_BLOCKS * BLOCK // keys_a_step, keys_a_step, COLUMNS // 2], gl.NVMMASharedLayout(swizzle, 32, 2)
    )
    # what there is to know of a role's keys
    notes = (
        gl.allocate_shared_memory(gl.int64, [3, 512 // keys_a_step, keys_a_step], PLAIN_2D),
        gl.allocate_shared_memory(gl.int32, [3, 512 // keys_a_step, keys_a_step], PLAIN_2D),
    )
    filled = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [SHORT, 1], mbarrier.MBarrierLayout())
    near = (
        gl.allocate_shared_memory(gl.bfloat16, [SHORT, 4096], PLAIN),
        (
            gl.allocate_shared_memory(gl.float32, [SHORT, 64], PLAIN),
            gl.allocate_shared_memory(gl.float32, [SHORT, 64], PLAIN),
            gl.allocate_shared_memory(gl.float32, [SHORT, 64], PLAIN),
        ),
        ready,
    )
    mbarrier.init(filled, count=3)
    for i in gl.static_range(SHORT):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (
                _add,
                (
                    output, half, held, lists, words_of_tiles, notes, slice_, tiles, made, count, near, filled, COLUMNS,
                    SPLIT,
                ),
            ),
            (
                _weigh,
                (
                    FIRST, held, lists, words_of_tiles, notes, slice_, makers, scores, tops, scale, made, count,
                    near, filled, COLUMNS,
                ),
            ),
            (
                _weigh,
                (
                    SECOND, held, lists, words_of_tiles, notes, slice_, makers, scores, tops, scale, made, count,
                    near, filled, COLUMNS,
                ),
            ),
        ],
        [4, 4],
        [WEIGH_REGISTERS, WEIGH_REGISTERS],
    )  # fmt: skip
