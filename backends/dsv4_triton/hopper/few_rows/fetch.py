# ruff: noqa: N803, SIM113 - constexpr names are upper case, and Gluon compiles a subset of Python
"""Packed keys on their way into shared memory as they are, for the kernels for few rows: a ring of raw bytes.

Registers hold loads in flight only as long as nothing that waits shares their scoreboard; copies to shared memory
(cp.async) are waited for one slot of the ring at a time, by whoever decodes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from dsv4_triton.hopper.layouts import BLOCK, KEYS, WORDS, thread_barrier
from dsv4_triton.hopper.notes import entries_of, factors_of, place_of

#: threads of this role, each of which says of every slot that its copies are done
FETCHING = gl.constexpr(128)
#: Groups of 64 bytes of a whole block, two a slot and one in the last. Two roles decode them: the first takes two
#: slots, the second three, and no two groups of a slot go to the same tile of 128 channels.
GROUPS = gl.constexpr(((0, 2), (1, 3), (4, 6), (5, 7), (8,)))


@gluon.jit
def fetch_blocks(row, lists, ring, notes, bars, first, step):
    """The role of four warps that fetches blocks ``first, first + step, ...`` of a row, five slots each.

    ring: int32 ``[2 * slots, 64, 16]``; notes (``_note``). A slot has landed when all copies before it have, too.
    """
    landed, taken, noted = bars
    slots: gl.constexpr = ring.shape[0] // 2
    entry, main, inside = entries_of(row, first, KEYS, BLOCK)
    done = 0
    used = 0
    for block in range(first, row[2], step):
        place, code, valid = place_of(lists, entry, main, inside)
        entry, main, inside = entries_of(row, block + step, KEYS, BLOCK)
        mbarrier.wait(taken.index(used % slots), ((used // slots) & 1) ^ 1)
        _note(notes, noted, done, code, valid)
        for j in gl.static_range(5):
            slot = used % slots
            if j > 0:
                mbarrier.wait(taken.index(slot), ((used // slots) & 1) ^ 1)
            for i in gl.static_range(len(GROUPS[j])):
                copy_group(place, GROUPS[j][i], ring.index(2 * slot + i), WORDS)
            async_copy.mbarrier_arrive(landed.index(slot), increment_count=False)
            used += 1
        done += 1


@gluon.jit
def _note(notes, noted, done, code, valid):
    """What decoding has to know of the ``done``-th block: int64 ``[entries, 64]`` scale bytes, which are there when its
    first slot is, and bf16 ``[entries, 64]``, 0 for keys that count and -inf for others.
    """
    codes, fills = notes
    entry = done % codes.shape[0]
    async_copy.async_copy_global_to_shared(codes.index(entry), code)
    fills.index(entry).store(gl.where(valid, 0.0, float("-inf")).to(gl.bfloat16))
    thread_barrier()
    mbarrier.arrive(noted.index(entry), count=1)


@gluon.jit
def copy_group(place, group, target, WORDS: gl.constexpr):
    """A group of 64 bytes of each key on its way into ``target``, int32 ``[64, 16]``."""
    words = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, WORDS)), 0) + group * 16
    start = gl.multiple_of(place.to(gl.pointer_type(gl.int32), bitcast=True), 16)
    async_copy.async_copy_global_to_shared(target, gl.expand_dims(start, 1) + words)


@gluon.jit
def slot_factors(code, valid, group):
    """The factors of a group of each key from its eight scale bytes, 0 for keys that do not count."""
    return gl.where(valid, factors_of((code >> (gl.to_tensor(group) * 8).to(gl.int64)).to(gl.int32) & 255), 0)
