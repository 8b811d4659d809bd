# ruff: noqa: N803, RUF059 - constexpr names are upper case, and Gluon compiles a subset of Python
"""Packed keys on their way into shared memory as they are, for the kernels for few rows: a ring of raw bytes.

Registers hold loads in flight only as long as nothing that waits shares their scoreboard; copies to shared memory
(cp.async) are waited for one slot at a time, by whoever decodes. A slot is two groups of 64 bytes of 64 keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from dsv4_triton.hopper_layouts import BLOCK, KEYS, WORDS, thread_barrier
from dsv4_triton.hopper_notes import place_of

#: threads of the role ``fetch``, each of which says of every slot that its copies are done
#: groups of a block in the order of slots: no two of a slot go to the same tile of 128 channels
ORDER = gl.constexpr((0, 2, 4, 6, 1, 3, 5, 7, 8))
FETCHING = gl.constexpr(128)


@gluon.jit
def entries(row, block, LAYOUT: gl.constexpr):
    """A block's entries of a row's lists, whether they are of the first one, and which are within its length.

    No lane is masked off: a load that some lanes leave out is waited for at once.
    """
    n, extra, blocks, index, extra_index = row
    main_blocks = (n + BLOCK - 1) // BLOCK
    main = block < main_blocks
    key = gl.where(main, block, block - main_blocks) * BLOCK + gl.arange(0, BLOCK, LAYOUT)
    length = gl.where(main, n, extra)
    inside = gl.maximum(gl.minimum(key, length - 1), 0)
    return gl.load(gl.where(main, index, extra_index) + inside), main, key < length


@gluon.jit
def fetch(row, lists, ring, notes, bars, first, step, slice_, WHOLE: gl.constexpr):
    """The role of four warps: blocks ``first, first + step, ...`` of a row, and notes on them.

    WHOLE: five slots a block, of groups 0 and 1, 2 and 3, 4 and 5, 6 and the first of rope, the second of rope.
    Otherwise one slot, of groups 2 ``slice_`` and the next; the slice that has rope takes two.

    ring: int32 ``[2 * slots, 64, 16]``; notes: int64 ``[entries, 64]`` scale bytes, fp32 ``[entries, 64]`` 0 for keys
    that count and -inf for others.
    """
    landed, taken, noted = bars
    codes, fills = notes
    slots: gl.constexpr = ring.shape[0] // 2
    entries_noted: gl.constexpr = codes.shape[0]
    entry, main, inside = entries(row, first, KEYS)
    done = 0
    used = 0
    for block in range(first, row[2], step):
        place, code, valid = place_of(lists, entry, main, inside)
        entry, main, inside = entries(row, block + step, KEYS)
        mbarrier.wait(taken.index(used % slots), ((used // slots) & 1) ^ 1)
        noted_at = done % entries_noted
        async_copy.async_copy_global_to_shared(codes.index(noted_at), code)
        fills.index(noted_at).store(gl.where(valid, 0.0, float("-inf")))
        thread_barrier()
        mbarrier.arrive(noted.index(noted_at), count=1)
        if WHOLE:
            for j in gl.static_range(5):
                slot = used % slots
                if j > 0:
                    mbarrier.wait(taken.index(slot), ((used // slots) & 1) ^ 1)
                _copy(place, ORDER[2 * j], ring.index(2 * slot))
                if j < 4:
                    _copy(place, ORDER[2 * j + 1], ring.index(2 * slot + 1))
                async_copy.mbarrier_arrive(landed.index(slot), increment_count=False)
                used += 1
        else:
            slot = used % slots
            _copy(place, 2 * slice_, ring.index(2 * slot))
            _copy(place, 2 * slice_ + 1, ring.index(2 * slot + 1))
            async_copy.mbarrier_arrive(landed.index(slot), increment_count=False)
            used += 1
            if slice_ == 3:
                slot = used % slots
                mbarrier.wait(taken.index(slot), ((used // slots) & 1) ^ 1)
                _copy(place, 8, ring.index(2 * slot))
                async_copy.mbarrier_arrive(landed.index(slot), increment_count=False)
                used += 1
        done += 1


@gluon.jit
def _copy(place, group, target):
    """A group of 64 bytes of each key."""
    words = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, WORDS)), 0) + group * 16
    start = gl.multiple_of(place.to(gl.pointer_type(gl.int32), bitcast=True), 16)
    async_copy.async_copy_global_to_shared(target, gl.expand_dims(start, 1) + words)
