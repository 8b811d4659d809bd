"""Queries under which every key of a row matters: peaked at critical keys, drawn to the sink, or flat.

With random queries over many keys one missing key changes nothing that a budget could see. Of every eight heads, five
are peaked at keys that a wrong backend would drop or add, one is aimed away from all keys so that its sink takes a
fair share, one is flat, and one is hot: its best score is beyond what exp holds in fp32. The judge measures that this
works; see ``dsv4_matrix.judge``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv4_matrix.cases.content import DEVIATION, HEAD_DIM, MEAN, Bank, FloatArray
from dsv4_matrix.cases.layout import WINDOW, IntArray
from dsv4_matrix.cases.streams import stream

#: Role of each head of eight: peaked, flat, sink or hot.
USUAL = "ppfpsphp"
#: Roles where bits are compared, ``z`` for near zero: few keys outweigh the others and the best score is about zero, so
#: that neither the logarithm of the sum nor the log-sum-exp is so large that it hides the sum's last bits.
FINE = "ppzpzpzp"
#: Scores of such a head deviate by this, for a query of this deviation.
_FINE_SCORES, _FINE_DEVIATION = 1.6, 4.0
#: A peaked key's score above the other keys', for up to 128 keys; grows with their logarithm, so that its share stays.
_BOOST = 5.5
#: The same of a hot key, far above the 88.7 at which exp overflows in fp32: a sum without its running maximum shows.
_HOT_BOOST = 110.0
#: Scores of a flat head deviate by about 0.8.
_FLAT_DEVIATION = 2.0
#: A sink head's log-sum-exp lies within this of its sink, so that the sink takes between a quarter and three quarters.
_SINK_SPREAD = 1.0
_ABSENT = -1

DoubleArray = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
AnyArray = np.ndarray[tuple[int, ...], np.dtype[Any]]


def sinks(kind: str, heads: int, seed: int) -> FloatArray:
    """fp32 ``[heads]``: ``off`` is -1e30, ``zero`` is 0, ``per-head`` distinct finite values in [-1.5, 2.5]."""
    if kind == "off":
        return np.full(heads, -1e30, np.float32)
    if kind == "zero":
        return np.zeros(heads, np.float32)
    if kind == "per-head":
        order = stream(seed, "sink").permutation(heads)
        return (-1.5 + 4.0 * (order + 0.5) / heads).astype(np.float32)
    raise ValueError(f"sink {kind!r} is not one of off, zero, per-head")


def select(positions: IntArray, index_topk: int, hostile: bool, seed: int, step: int) -> IntArray:
    """The C4 indexer's choice: request-local entry ids ``[T, index_topk]``, -1 padded.

    All complete entries where they fit, otherwise exactly ``index_topk`` distinct ones, the oldest and the newest
    among them. In random order when ``hostile``, ascending otherwise.
    """
    selection = np.full((len(positions), index_topk), _ABSENT, np.int64)
    counts = (positions + 1) // 4
    generator = stream(seed, "selection", step)
    width = int(counts.max(initial=0))
    # One random key an entry: sorting by it shuffles each row, absent entries last; forced ones keep the least keys.
    keys = generator.random((len(positions), width))
    entry = np.arange(width)[None, :]
    chosen = keys.copy()
    chosen[(entry == 0) | (entry == counts[:, None] - 1)] = -1.0
    chosen[entry >= counts[:, None]] = 2.0
    picked = np.argsort(chosen, axis=1, kind="stable")[:, :index_topk]
    present = np.take_along_axis(chosen, picked, 1) < 2.0
    picked = np.where(present, picked, width)
    if hostile:
        rank = np.where(present, np.take_along_axis(keys, np.minimum(picked, max(width - 1, 0)), 1), 2.0)
        picked = np.take_along_axis(picked, np.argsort(rank, axis=1, kind="stable"), 1)
    else:
        picked = np.sort(picked, axis=1)
    selection[:, : picked.shape[1]] = np.where(picked < width, picked, _ABSENT)
    return selection


def draw_queries(
    bank: Bank,
    ratio: int,
    request: IntArray,
    positions: IntArray,
    selection: IntArray | None,
    sink: FloatArray,
    scale: float,
    seed: int,
    step: int,
    roles: str = USUAL,
) -> Tensor:
    """bf16 ``[T, H, 512]``, contiguous, on the bank's device. One pass a role; no loop over rows."""
    rows, heads, device = len(positions), len(sink), bank.tokens.device
    queries = torch.empty((rows, heads, HEAD_DIM), dtype=torch.bfloat16, device=device)
    if not rows:
        return queries
    generator = stream(seed, "queries", step)
    dealt = np.array(list(roles))[np.arange(heads) % len(roles)]
    peaked, sunk, flat, hot = (np.flatnonzero(dealt == role) for role in "psfh")
    fine = np.flatnonzero(dealt == "z")
    seen = np.minimum(positions + 1, WINDOW)
    if ratio:
        complete = (positions + 1) // ratio
        seen = seen + (np.minimum(complete, selection.shape[1]) if selection is not None else complete)

    aimed = _rotated(_critical_keys(bank, ratio, request, positions, selection, generator), len(peaked))
    # q = a k scores a scale |k|^2 at k and a scale |mu|^2 elsewhere: a scale 512 DEVIATION^2 less.
    boost = _BOOST + np.log(np.maximum(seen, WINDOW) / WINDOW)
    # Exact: magnitudes are powers of two. K and mu are in theirs already, noise is not.
    size = bank.magnitude[request]
    unit = 1 / (size * size)
    gain = (boost / (scale * HEAD_DIM * DEVIATION**2)).astype(np.float32) * unit
    hot_gain = np.float32(_HOT_BOOST / (scale * HEAD_DIM * DEVIATION**2)) * unit
    want = np.where(sink > -100, sink, 0)[sunk] + generator.uniform(-_SINK_SPREAD, _SINK_SPREAD, (rows, len(sunk)))
    away = _away(want, np.log(seen)[:, None], scale).astype(np.float32) * unit[:, None]
    noise = _FLAT_DEVIATION * generator.standard_normal((rows, len(flat), HEAD_DIM), dtype=np.float32)
    noise /= size[:, None, None]
    # A hot head looks at a token that it sees: its weight is one, whatever quantisation does to the scores.
    tokens_seen = np.minimum(positions + 1, WINDOW)[:, None]
    own = (bank.token_base[request] + positions)[:, None]
    glowing = own - generator.integers(0, tokens_seen, (rows, len(hot)))

    # The same as away, with scores that deviate by themselves: exp of a normal is larger by half its variance.
    spread = np.log(seen)[:, None] + _FINE_SCORES**2 / 2
    level = _away(generator.uniform(-0.5, 0.5, (rows, len(fine))), spread, scale).astype(np.float32) * unit[:, None]
    jitter = _FINE_DEVIATION * generator.standard_normal((rows, len(fine), HEAD_DIM), dtype=np.float32)
    jitter /= size[:, None, None]

    def moved(array: AnyArray) -> Tensor:
        return torch.from_numpy(array).to(device)

    queries[:, moved(peaked)] = (_gathered(bank, moved(aimed)) * moved(gain)[:, None, None]).to(queries.dtype)
    queries[:, moved(hot)] = (_gathered(bank, moved(glowing)) * moved(hot_gain)[:, None, None]).to(queries.dtype)
    queries[:, moved(sunk)] = (moved(away)[..., None] * bank.mean[moved(request)][:, None, :]).to(queries.dtype)
    queries[:, moved(flat)] = moved(noise).to(queries.dtype)
    towards_mean = moved(level)[..., None] * bank.mean[moved(request)][:, None, :]
    queries[:, moved(fine)] = (towards_mean + moved(jitter)).to(queries.dtype)
    return queries


def _gathered(bank: Bank, keys: Tensor) -> Tensor:
    """fp32 ``[T, P, 512]``: rows of the tokens and, numbered behind them, of the entries."""
    tokens = len(bank.tokens)
    found = bank.tokens[keys.clamp(max=tokens - 1)]
    if len(bank.entries):
        found = torch.where((keys < tokens)[..., None], found, bank.entries[(keys - tokens).clamp(min=0)])
    return found.float()


def _away(want: DoubleArray, log_count: DoubleArray, scale: float) -> DoubleArray:
    """b such that q = b mu has log-sum-exp ``want``: b u + (b v)^2 / 2 + log_count = want, the root next to zero.

    Scores of q = b mu are normal with mean b u, u = scale |mu|^2, and deviation b v, v = scale |mu| DEVIATION.
    """
    u = scale * HEAD_DIM * MEAN**2
    v = scale * MEAN * np.sqrt(HEAD_DIM) * DEVIATION
    discriminant = np.maximum(u * u + 2 * v * v * (want - log_count), 0.0)
    return np.asarray((-u + np.sqrt(discriminant)) / (v * v))


def _critical_keys(
    bank: Bank,
    ratio: int,
    request: IntArray,
    positions: IntArray,
    selection: IntArray | None,
    generator: np.random.Generator,
) -> IntArray:
    """Rows of the bank that each query row is aimed at, ``[T, K]``, -1 where a row has no such key."""
    base, seen = bank.token_base[request], np.minimum(positions + 1, WINDOW)
    rows = len(positions)
    newest = base + positions
    targets = [
        newest,
        newest - seen + 1,
        np.where(positions >= WINDOW, newest - WINDOW, _ABSENT),
        newest + 1,
        newest - generator.integers(0, seen),
    ]
    if ratio:
        base, complete = len(bank.tokens) + bank.entry_base[request], (positions + 1) // ratio
        some = complete > 0
        if selection is None:
            chosen = generator.integers(0, np.maximum(complete, 1))
        else:
            width = np.minimum(complete, selection.shape[1])
            chosen = selection[np.arange(rows), generator.integers(0, np.maximum(width, 1))]
        targets += [
            np.where(some, base + complete - 1, _ABSENT),
            np.where(some, base, _ABSENT),
            base + complete,
            np.where(some, base + chosen, _ABSENT),
        ]
        if selection is not None:
            left_out = generator.integers(0, np.maximum(complete, 1))
            missing = some & ~(selection == left_out[:, None]).any(1)
            targets.append(np.where(missing, base + left_out, _ABSENT))
    return np.stack(targets, 1)


def _rotated(targets: IntArray, heads: int) -> IntArray:
    """Deal each row's present targets to its peaked heads in turn, starting at another one in each row."""
    present = targets != _ABSENT
    ordered = np.take_along_axis(targets, np.argsort(~present, axis=1, kind="stable"), 1)
    turn = np.arange(heads)[None, :] + np.arange(len(targets))[:, None]
    return np.asarray(np.take_along_axis(ordered, turn % present.sum(1, keepdims=True), 1))
