"""Queries under which every key of a row matters: peaked at critical keys, drawn to the sink, or flat.

With random queries over many keys one missing key changes nothing that a budget could see. Of every eight heads, five
are peaked at keys that a wrong backend would drop or add, one is aimed away from all keys so that its sink takes a
fair share, one is flat, and one is hot: its best score is beyond what exp holds in fp32. The judge measures that this
works; see ``dsv4_matrix.judge``. Which head has which role moves from row to row, from step to step and with the seed:
next to a hot head's scores no sink weighs anything, so a head that was hot in all rows would never need its sink.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv4_matrix.cases.content import DEVIATION, HEAD_DIM, MEAN, Bank, FloatArray
from dsv4_matrix.cases.layout import WINDOW, IntArray
from dsv4_matrix.cases.streams import stream
from dsv4_matrix.cases.targets import critical_keys, dealt

#: Role of each head of eight, up to a turn of its own for each row: peaked, flat, sink or hot.
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
#: A peaked head's log-sum-exp is about this above its sink, or less: a budget hides a sink that is five below.
_SINK_REACH = 3.0
#: Heads by which roles move from one row to the next. Odd, so that in eight rows each head has each role.
_TURN = 3
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
    """bf16 ``[T, H, 512]``, contiguous, on the bank's device. One pass a role; no loop over rows.

    Queries are drawn for places, which have the same role in each row, and then moved to heads: see ``_place_of``.
    """
    rows, heads, device = len(positions), len(sink), bank.tokens.device
    queries = torch.empty((rows, heads, HEAD_DIM), dtype=torch.bfloat16, device=device)
    if not rows:
        return queries
    generator = stream(seed, "queries", step)
    place = _place_of(rows, heads, seed, step)
    sinks_at = sink[np.argsort(place, axis=1)]
    role_at = np.array(list(roles))[np.arange(heads) % len(roles)]
    peaked, sunk, flat, hot = (np.flatnonzero(role_at == role) for role in "psfh")
    fine = np.flatnonzero(role_at == "z")
    seen = np.minimum(positions + 1, WINDOW)
    if ratio:
        complete = (positions + 1) // ratio
        seen = seen + (np.minimum(complete, selection.shape[1]) if selection is not None else complete)

    aimed = dealt(critical_keys(bank, ratio, request, positions, selection, generator), len(peaked))
    # q = a k scores a scale |k|^2 at k and a scale |mu|^2 elsewhere: a scale 512 DEVIATION^2 less.
    boost = _BOOST + np.log(np.maximum(seen, WINDOW) / WINDOW)
    # Exact: magnitudes are powers of two. K and mu are in theirs already, noise is not.
    size = bank.magnitude[request]
    unit = 1 / (size * size)
    gain = (boost / (scale * HEAD_DIM * DEVIATION**2)).astype(np.float32) * unit
    hot_gain = np.float32(_HOT_BOOST / (scale * HEAD_DIM * DEVIATION**2)) * unit
    want = np.where(sinks_at > -100, sinks_at, 0)[:, sunk] + generator.uniform(
        -_SINK_SPREAD, _SINK_SPREAD, (rows, len(sunk))
    )
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
    lowered = _lowered(sinks_at[:, peaked], boost, seen, scale, generator).astype(np.float32) * unit[:, None]

    def moved(array: AnyArray) -> Tensor:
        return torch.from_numpy(array).to(device)

    mean = bank.mean[moved(request)][:, None, :]
    at_keys = _gathered(bank, moved(aimed)) * moved(gain)[:, None, None]
    queries[:, moved(peaked)] = (at_keys + moved(lowered)[..., None] * mean).to(queries.dtype)
    queries[:, moved(hot)] = (_gathered(bank, moved(glowing)) * moved(hot_gain)[:, None, None]).to(queries.dtype)
    queries[:, moved(sunk)] = (moved(away)[..., None] * mean).to(queries.dtype)
    queries[:, moved(flat)] = moved(noise).to(queries.dtype)
    queries[:, moved(fine)] = (moved(level)[..., None] * mean + moved(jitter)).to(queries.dtype)
    return queries[torch.arange(rows, device=device)[:, None], moved(place)]


def _lowered(
    sink: FloatArray, boost: DoubleArray, seen: IntArray, scale: float, generator: np.random.Generator
) -> DoubleArray:
    """b ``[T, P]``: peaked queries are given b mu more, so that beside their scores the sink ``[T, P]`` still weighs.

    Negative where their log-sum-exp would be far above the sink, zero where it is near enough or the sink is off.
    """
    own = boost * MEAN**2 / DEVIATION**2 + np.log(seen + np.exp(boost))
    most = np.where(sink > -100, sink, np.inf) + generator.uniform(0.0, _SINK_REACH, sink.shape)
    return np.where(most < own[:, None], _away(np.minimum(most, own[:, None]), own[:, None], scale), 0.0)


def _place_of(rows: int, heads: int, seed: int, step: int) -> IntArray:
    """int64 ``[T, H]``: the place, of ``heads``, whose query each head of a row has. A rotation in each row."""
    turn = seed % heads + _TURN * (step + np.arange(rows))
    return (np.arange(heads)[None, :] + turn[:, None]) % heads


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
