# ruff: noqa: N803 - constexpr names are upper case, and Triton compiles a subset of Python
"""Kernels of chain verification: acceptance as one vector over the slots, sums over the vocabulary in index order.

Tiling: one program a request. Acceptance is one vector over the slots: every step can be judged at once and the first
failure ends the chain. The sums are scalar and in index order on purpose: an fp32 total depends on the order, and index
order is the one order that a CPU, a GPU and a reader share. Loads of sixteen columns are in flight at a time, which
hides most of the cost; a step costs O(vocabulary) additions, independent of the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["vocabulary"])
def argmax_kernel(values, stride, vocabulary, out, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = lane
    start = 0
    while start < vocabulary:
        at = start + lane
        value = tl.load(values + row * stride + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        larger = value > best  # false for NaN, and for a tie, which leaves the lower index
        best = tl.where(larger, value, best)
        index = tl.where(larger, at, index)
        start += BLOCK
    largest = tl.max(best, axis=0)
    tl.store(out + row, tl.min(tl.where(best == largest, index, 0x7FFFFFFF), axis=0))


@triton.jit
def _kept(ok, slot, width):
    """Kept drafts, given which steps pass: slots before the first failing one."""
    return tl.min(tl.where(ok | (slot < 1) | (slot >= width), width, slot), axis=0) - 1


@triton.jit
def _write(tokens, predict, accept_index, counts, request, slot, width, count, final):
    inside = slot < width
    following = tl.load(tokens + request * width + slot + 1, mask=slot + 1 < width, other=-1).to(tl.int32)
    token = tl.where(slot < count, following, tl.where(slot == count, final, -1))
    place = (request * width + slot).to(tl.int32)
    tl.store(predict + request * width + slot, token, mask=inside)
    tl.store(accept_index + request * width + slot, tl.where(slot <= count, place, -1), mask=inside)
    tl.store(counts + request, count)


@triton.jit(do_not_specialize=["width"])
def greedy_kernel(tokens, target_tokens, predict, accept_index, counts, width, SLOTS: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    drafted = tl.load(tokens + request * width + slot, mask=slot < width, other=-1).to(tl.int32)
    chosen = tl.load(target_tokens + request * width + slot - 1, mask=(slot > 0) & (slot < width), other=-1)
    count = _kept(drafted == chosen, slot, width)
    final = tl.load(target_tokens + request * width + count)
    _write(tokens, predict, accept_index, counts, request, slot, width, count, final)


@triton.jit
def _mass(target, draft, at, vocabulary, refused, partial, CLASSIC: tl.constexpr):
    """Mass of one column for the final draw; 0 beyond the vocabulary and for NaN."""
    mass = tl.load(target + at, mask=at < vocabulary, other=0.0)
    if CLASSIC:
        q = tl.load(draft + at, mask=partial & (at < vocabulary), other=0.0)
        mass -= tl.where(q == q, q, 0.0)
    return tl.where((mass > 0.0) & (at != refused), mass, 0.0)


@triton.jit
def _draw(target, draft, vocabulary, refused, partial, coin, CLASSIC: tl.constexpr, UNROLL: tl.constexpr):
    """First column whose running sum exceeds coin * total, and the last one with mass; -1 where there is none."""
    total = 0.0
    last = -1
    start = 0
    while start < vocabulary:
        for k in tl.static_range(UNROLL):
            mass = _mass(target, draft, start + k, vocabulary, refused, partial, CLASSIC)
            total += mass
            last = tl.where(mass > 0.0, start + k, last)
        start += UNROLL
    bound = coin * total
    running = 0.0
    token = -1
    start = 0
    while (start < vocabulary) & (token < 0):
        for k in tl.static_range(UNROLL):
            running += _mass(target, draft, start + k, vocabulary, refused, partial, CLASSIC)
            beyond = (token < 0) & (running > bound) & (start + k < vocabulary)
            token = tl.where(beyond, start + k, token)
        start += UNROLL
    return token, last


@triton.jit
def _draw_whole(target, draft, vocabulary, refused, partial, coin, CLASSIC: tl.constexpr, WHOLE: tl.constexpr):
    """``_draw`` for the interpreter, whose scan adds in index order and whose scalar loops are slow; tested equal."""
    at = tl.arange(0, WHOLE)
    mass = _mass(target, draft, at, vocabulary, refused, partial, CLASSIC)
    running = tl.cumsum(mass, axis=0)
    total = tl.max(running, axis=0)  # sums of masses never fall
    token = tl.min(tl.where((running > coin * total) & (at < vocabulary), at, 0x7FFFFFFF), axis=0)
    last = tl.max(tl.where(mass > 0.0, at, -1), axis=0)
    return tl.where(token == 0x7FFFFFFF, -1, token), last


@triton.jit(do_not_specialize=["width", "vocabulary", "threshold_single", "threshold_acc"])
def sampling_kernel(
    tokens, target, draft, reject, final, predict, accept_index, counts, width, vocabulary,
    threshold_single, threshold_acc,
    CLASSIC: tl.constexpr, SLOTS: tl.constexpr, UNROLL: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    drafted = tl.load(tokens + request * width + slot, mask=slot < width, other=-1).to(tl.int64)
    step = (slot > 0) & (slot < width)
    known = step & (drafted >= 0) & (drafted < vocabulary)
    coin = tl.load(reject + request * width + slot - 1, mask=step, other=0.0)
    p = tl.load(target + (request * width + slot - 1) * vocabulary + drafted, mask=known, other=0.0)
    p = tl.where(p == p, p, 0.0)
    if CLASSIC:
        q = tl.load(draft + (request * (width - 1) + slot - 1) * vocabulary + drafted, mask=known, other=0.0)
        ok = coin * tl.where(q == q, q, 0.0) < p
    else:
        ok = (coin <= tl.div_rn(p, tl.zeros_like(p) + threshold_acc)) | (p >= threshold_single)
    count = _kept(ok, slot, width)

    partial = count < width - 1
    target += (request * width + count) * vocabulary
    draft += (request * (width - 1) + count) * vocabulary  # read only if partial: the last slot has no proposal
    refused = tl.load(tokens + request * width + count + 1, mask=partial & (not CLASSIC), other=-1).to(tl.int64)

    coin = tl.load(final + request)
    if WHOLE == 0:
        token, last = _draw(target, draft, vocabulary, refused, partial, coin, CLASSIC, UNROLL)
    else:
        token, last = _draw_whole(target, draft, vocabulary, refused, partial, coin, CLASSIC, WHOLE)
    if CLASSIC:
        last = -1
    token = tl.where(token >= 0, token, tl.where(last >= 0, last, vocabulary - 1))
    _write(tokens, predict, accept_index, counts, request, slot, width, count, token)
