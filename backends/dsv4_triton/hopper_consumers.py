# ruff: noqa: N803, RUF059, SIM102 - constexpr names are upper case, and Gluon compiles a subset of Python
"""The consumers of the Hopper kernel: ``left`` has scores, softmax and half of the output, ``right`` the other half."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4_triton.hopper_items import item_lengths, item_place, item_span, offset_of
from dsv4_triton.hopper_layouts import (
    BLOCK,
    PARTIAL_WORDS,
    PIECES,
    SCORES,
    STAGES,
    SUMS_64,
    SUMS_128,
    thread_barrier,
)
from dsv4_triton.numerics import LN2, LOG2E


@gluon.jit
def _stage(keys, stage):
    """The five tiles of keys of a stage."""
    return (
        keys[0].index(stage), keys[1].index(stage), keys[2].index(stage), keys[3].index(stage), keys[4].index(stage),
    )  # fmt: skip


@gluon.jit
def _scores(query, tiles):
    s = gl.zeros([64, BLOCK], gl.float32, SCORES)
    s = warpgroup_mma(query[0], tiles[0].permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma(query[1], tiles[1].permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(query[2], tiles[2].permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(query[3], tiles[3].permute((1, 0)), s, is_async=True)
    return warpgroup_mma(query[4], tiles[4].permute((1, 0)), s, is_async=True)


@gluon.jit
def _soften(s, bias, top, total, scale):
    """Online softmax in base 2: probabilities, factor of what came before, maximum, sum."""
    bias = gl.expand_dims(bias.load(gl.SliceLayout(0, SCORES)), 0)
    s = gl.where(bias == float("-inf"), float("-inf"), s * scale + bias)
    new_top = gl.maximum(top, gl.max(s, 1))
    shift = gl.where(new_top == float("-inf"), 0.0, new_top)
    p = gl.exp2(s - gl.expand_dims(shift, 1))
    keep = gl.exp2(top - shift)
    return p, keep, new_top, total * keep + gl.sum(p, 1)


@gluon.jit
def _now(x):
    """x, not known to be the same from item to item: what follows from it is not kept across the loop over keys."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _tile_offsets(stride, WIDTH: gl.constexpr):
    """Offsets of a tile of 64 heads by WIDTH columns, heads ``stride`` pieces of eight elements apart."""
    h = gl.expand_dims(_now(gl.arange(0, 64, gl.SliceLayout(1, PIECES))), 1)
    return h * (stride * 8) + gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, PIECES)), 0)


@gluon.jit
def _query(q, strides, place, tiles):
    """Queries of an item, on their way into shared memory."""
    local, b, s, head_block, split = place
    q_b, q_s, q_h = strides
    rows = q + (offset_of(b, q_b, s, q_s) + head_block.to(gl.int64) * 64 * q_h) * 8
    async_copy.async_copy_global_to_shared(tiles[0], rows + _tile_offsets(q_h, 128))
    async_copy.async_copy_global_to_shared(tiles[1], rows + (128 + _tile_offsets(q_h, 128)))
    async_copy.async_copy_global_to_shared(tiles[2], rows + (256 + _tile_offsets(q_h, 128)))
    async_copy.async_copy_global_to_shared(tiles[3], rows + (384 + _tile_offsets(q_h, 64)))
    async_copy.async_copy_global_to_shared(tiles[4], rows + (448 + _tile_offsets(q_h, 64)))
    async_copy.commit_group()


@gluon.jit
def _emit(
    out, place, acc, factor, tile, splits, partial, partial_splits, heads,
    COLUMN: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Columns of an item: normalised bf16 through a tile of shared memory, or the bare sums of a split."""
    local, b, s, head_block, split = place
    base, o_b, o_s, o_h = out
    acc = acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, LAYOUT)), 1)
    if SPLIT:
        if splits > 1:
            h = head_block * 64 + _now(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)))
            row = ((local.to(gl.int64) * partial_splits + split) * heads + h) * PARTIAL_WORDS
            column = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT)) + COLUMN
            gl.store(partial + (gl.expand_dims(row, 1) + gl.expand_dims(column, 0)), acc)
    tile.store(acc.to(gl.bfloat16))
    x = tile.load(PIECES)
    start = (offset_of(b, o_b, s, o_s) + head_block.to(gl.int64) * 64 * o_h) * 8 + COLUMN
    pointers = base + start + _tile_offsets(o_h, WIDTH)
    if SPLIT:
        gl.store(pointers, x, mask=splits == 1)
    else:
        gl.store(pointers, x)


@gluon.jit
def left(
    q, q_strides, out, lse, sink, rows, scale, heads, partial, partial_splits, query, keys, hand, bars, hand_bars,
    items, SPLIT: gl.constexpr, HEAD_BLOCKS: gl.constexpr, SPLIT_BLOCKS: gl.constexpr,
):  # fmt: skip
    probabilities, keeps, factors = hand
    full, empty = bars
    ready, taken, finished, seen = hand_bars
    lse_base, l_b, l_s, l_h = lse
    bias = keys[5]
    h = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    done = 0
    rows_done = 0
    step = gl.num_programs(0)
    n, extra = item_lengths(rows, gl.program_id(0), SPLIT, HEAD_BLOCKS)
    _query(q, q_strides, item_place(rows, gl.program_id(0), SPLIT, HEAD_BLOCKS), query)
    for item in range(gl.program_id(0), items, step):
        place = item_place(rows, item, SPLIT, HEAD_BLOCKS)
        local, b, s, head_block, split = place
        first, count, splits = item_span(n, extra, split, SPLIT, SPLIT_BLOCKS)
        after = gl.minimum(item + step, items - 1)
        given = rows[4]
        sinks = gl.load(sink + head_block * 64 + h, mask=(h >= 0) & ((given & 4) != 0), other=float("-inf"))
        async_copy.wait_group(0)
        if count > 0:
            fence_async_shared()
            thread_barrier()
            acc_a = gl.zeros([64, 128], gl.float32, SUMS_128)
            acc_b = gl.zeros([64, 128], gl.float32, SUMS_128)
            top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
            total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
            stage = done % STAGES
            phase = (done // STAGES) & 1
            mbarrier.wait(full.index(stage), phase)
            fence_async_shared()
            s_ = _scores(query, _stage(keys, stage))
            s_ = warpgroup_mma_wait(0, deps=[s_])
            p, keep, top, total = _soften(s_, bias.index(stage), top, total, scale)
            p16 = p.to(gl.bfloat16)
            mbarrier.wait(taken.index(stage), phase ^ 1)
            probabilities.index(stage).store(p16)
            keeps.index(stage).store(keep)
            mbarrier.arrive(ready.index(stage), count=1)
            for _i in range(1, count):
                before = stage
                done += 1
                stage = done % STAGES
                phase = (done // STAGES) & 1
                operand = gl.convert_layout(p16, gl.DotOperandLayout(0, SUMS_128, 2))
                sums_a = warpgroup_mma(operand, keys[0].index(before), acc_a, is_async=True)
                sums_b = warpgroup_mma(operand, keys[1].index(before), acc_b, is_async=True)
                # The stage is given back before the next one is waited for: were it held through the next softmax,
                # decoding and attending would take turns.
                acc_a, acc_b = warpgroup_mma_wait(0, deps=[sums_a, sums_b])
                mbarrier.arrive(empty.index(before), count=1)
                mbarrier.wait(full.index(stage), phase)
                fence_async_shared()
                s_ = _scores(query, _stage(keys, stage))
                s_ = warpgroup_mma_wait(0, deps=[s_])
                p, keep, top, total = _soften(s_, bias.index(stage), top, total, scale)
                p16 = p.to(gl.bfloat16)
                mbarrier.wait(taken.index(stage), phase ^ 1)
                probabilities.index(stage).store(p16)
                keeps.index(stage).store(keep)
                mbarrier.arrive(ready.index(stage), count=1)
                kept = gl.expand_dims(gl.convert_layout(keep, gl.SliceLayout(1, SUMS_128)), 1)
                acc_a = acc_a * kept
                acc_b = acc_b * kept
            done += 1
            thread_barrier()  # every warp has read the queries
            if item + step < items:
                _query(q, q_strides, item_place(rows, after, SPLIT, HEAD_BLOCKS), query)
            operand = gl.convert_layout(p16, gl.DotOperandLayout(0, SUMS_128, 2))
            sums_a = warpgroup_mma(operand, keys[0].index(stage), acc_a, is_async=True)
            sums_b = warpgroup_mma(operand, keys[1].index(stage), acc_b, is_async=True)
            # total == 0 tells an empty row and is false for NaN: a poisoned row must not come out as zeros
            vacant = total == 0.0
            filled = gl.where(vacant, 1.0, total)
            weight = gl.exp2(sinks * LOG2E - gl.where(vacant, 0.0, top))
            factor = gl.where(vacant, 0.0, 1.0 / (filled + weight))
            row_lse = gl.where(vacant, float("inf"), (top + gl.log2(filled)) * LN2)
            lse_at = lse_base + (offset_of(b, l_b, s, l_s) + (head_block * 64 + h).to(gl.int64) * l_h)
            if SPLIT:
                factor = gl.where(splits > 1, 1.0, factor)
                gl.store(lse_at, row_lse, mask=(h >= 0) & (splits == 1))
                row = ((local.to(gl.int64) * partial_splits + split) * heads + head_block * 64 + h) * PARTIAL_WORDS
                gl.store(partial + (row + 512), top, mask=(h >= 0) & (splits > 1))
                gl.store(partial + (row + 513), total, mask=(h >= 0) & (splits > 1))
            else:
                gl.store(lse_at, row_lse)
            n, extra = item_lengths(rows, after, SPLIT, HEAD_BLOCKS)
            mbarrier.wait(seen, (rows_done & 1) ^ 1)
            factors.store(factor)
            mbarrier.arrive(finished, count=1)
            acc_a, acc_b = warpgroup_mma_wait(0, deps=[sums_a, sums_b])
            _emit(
                out, place, acc_a, factor, keys[0].index(stage), splits, partial, partial_splits, heads,
                0, 128, SUMS_128, SPLIT,
            )  # fmt: skip
            _emit(
                out, place, acc_b, factor, keys[1].index(stage), splits, partial, partial_splits, heads,
                128, 128, SUMS_128, SPLIT,
            )  # fmt: skip
            mbarrier.arrive(empty.index(stage), count=1)
            rows_done += 1
        else:
            n, extra = item_lengths(rows, after, SPLIT, HEAD_BLOCKS)
            if item + step < items:
                _query(q, q_strides, item_place(rows, after, SPLIT, HEAD_BLOCKS), query)


@gluon.jit
def right(
    out, rows, heads, partial, partial_splits, keys, hand, bars, hand_bars, items,
    SPLIT: gl.constexpr, HEAD_BLOCKS: gl.constexpr, SPLIT_BLOCKS: gl.constexpr,
):  # fmt: skip
    probabilities, keeps, factors = hand
    full, empty = bars
    ready, taken, finished, seen = hand_bars
    done = 0
    rows_done = 0
    step = gl.num_programs(0)
    n, extra = item_lengths(rows, gl.program_id(0), SPLIT, HEAD_BLOCKS)
    for item in range(gl.program_id(0), items, step):
        place = item_place(rows, item, SPLIT, HEAD_BLOCKS)
        first, count, splits = item_span(n, extra, place[4], SPLIT, SPLIT_BLOCKS)
        if count > 0:
            acc_b = gl.zeros([64, 128], gl.float32, SUMS_128)
            acc_c = gl.zeros([64, 64], gl.float32, SUMS_64)
            acc_rope = gl.zeros([64, 64], gl.float32, SUMS_64)
            for i in range(count):
                stage = done % STAGES
                phase = (done // STAGES) & 1
                mbarrier.wait(full.index(stage), phase)
                mbarrier.wait(ready.index(stage), phase)
                fence_async_shared()
                keep = keeps.index(stage).load(gl.SliceLayout(1, SUMS_128))
                keep_64 = gl.expand_dims(gl.convert_layout(keep, gl.SliceLayout(1, SUMS_64)), 1)
                acc_b = acc_b * gl.expand_dims(keep, 1)
                acc_c = acc_c * keep_64
                acc_rope = acc_rope * keep_64
                sums_b = warpgroup_mma(probabilities.index(stage), keys[2].index(stage), acc_b, is_async=True)
                sums_c = warpgroup_mma(probabilities.index(stage), keys[3].index(stage), acc_c, is_async=True)
                sums_rope = warpgroup_mma(probabilities.index(stage), keys[4].index(stage), acc_rope, is_async=True)
                acc_b, acc_c, acc_rope = warpgroup_mma_wait(0, deps=[sums_b, sums_c, sums_rope])
                mbarrier.arrive(taken.index(stage), count=1)
                mbarrier.arrive(empty.index(stage), count=1, pred=i + 1 < count)
                done += 1
            mbarrier.wait(finished, rows_done & 1)
            factor = factors.load(gl.SliceLayout(1, SUMS_128))
            mbarrier.arrive(seen, count=1)
            n, extra = item_lengths(rows, gl.minimum(item + step, items - 1), SPLIT, HEAD_BLOCKS)
            last = (done - 1) % STAGES
            tiles = _stage(keys, last)
            _emit(
                out, place, acc_b, factor, tiles[2], splits, partial, partial_splits, heads,
                256, 128, SUMS_128, SPLIT,
            )  # fmt: skip
            _emit(
                out, place, acc_c, factor, tiles[3], splits, partial, partial_splits, heads,
                384, 64, SUMS_64, SPLIT,
            )  # fmt: skip
            _emit(
                out, place, acc_rope, factor, tiles[4], splits, partial, partial_splits, heads,
                448, 64, SUMS_64, SPLIT,
            )  # fmt: skip
            mbarrier.arrive(empty.index(last), count=1)
            rows_done += 1
        else:
            n, extra = item_lengths(rows, gl.minimum(item + step, items - 1), SPLIT, HEAD_BLOCKS)
