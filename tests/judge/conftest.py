"""Small scenarios that need no backend, and a kernel-like attention to judge."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from zlib import crc32

import dsv4_reference
import pytest
import torch

from dsv4_matrix.cases.scenario import Observation, Scenario, Step
from dsv4_matrix.declaration.model import Budget, Case, Tolerance, Tolerances
from dsv4_matrix.judge import judge

SCALE = 512**-0.5
NO_SINK = -1e30


def make_step(name, ratio, positions, *, heads=16, sink="off", topk=512, style="critical"):
    """One decode-like row a request; keys mu + z, half of the heads peaked at the keys that mistakes touch."""
    generator = torch.Generator().manual_seed(crc32(name.encode()))

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    tokens, entries, selections, queries = [], [], [], []
    width = topk if ratio == 4 else 0
    sinks = {
        "off": torch.full((heads,), NO_SINK),
        "zero": torch.zeros(heads),
        "per-head": torch.linspace(-1.5, 1.5, heads),
    }[sink]
    for position in positions:
        mu = 0.125 * normal(512).sign()
        count = (position + 1) // ratio if ratio else 0
        kept = torch.randperm(count, generator=generator)[:width] if ratio == 4 else torch.arange(count)
        k = torch.zeros(position + 2, 512)
        near = k[max(0, position - 200) :]  # older tokens are out of every window
        near[:] = mu + 0.375 * normal(*near.shape)
        k = k.bfloat16()
        e = (mu + 0.375 * normal(count + 1, 512)).bfloat16() if ratio else k[:0]
        if style == "constant":
            k, e = mu.bfloat16().expand_as(k).clone(), mu.bfloat16().expand_as(e).clone()
        selections.append(torch.nn.functional.pad(kept, (0, width - len(kept)), value=-1) if ratio == 4 else None)
        critical = [k[position], k[position + 1], k[max(0, position - 127)]]
        critical += [k[position - 128]] if position >= 128 else []
        if ratio:
            critical += [e[count]]
            critical += [e[kept.min()], e[kept.max()]] if count else []
        keys = min(position + 1, 128) + len(kept)
        queries.append(make_queries(style, heads, critical, mu, keys, sinks, normal))
        tokens.append(k)
        entries.append(e)

    def base(parts):
        return torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)

    rows = len(positions)
    offered = torch.stack(selections).int() if rows and ratio == 4 else torch.zeros(0, width, dtype=torch.int32)
    return Step(
        ratio=ratio,
        request=torch.arange(rows),
        positions=torch.tensor(positions, dtype=torch.int64),
        prefix_lens=tuple(positions),
        row_counts=(1,) * rows,
        tokens=torch.cat(tokens) if rows else torch.zeros(0, 512).bfloat16(),
        token_base=base(tokens),
        entries=torch.cat(entries) if rows else torch.zeros(0, 512).bfloat16(),
        entry_base=base(entries),
        selection=offered if ratio == 4 else None,
        q=torch.stack(queries).bfloat16() if rows else torch.zeros(0, heads, 512).bfloat16(),
        sink=sinks,
        k=torch.zeros(rows, 512).bfloat16(),
        compressed=None,
        softmax_scale=SCALE,
    )


def make_queries(style, heads, critical, mu, keys, sinks, normal):
    """``[heads, 512]``: peaked heads first, then some whose log-sum-exp lies near their sink, then flat ones."""
    if style == "zero":
        return torch.zeros(heads, 512)
    rows = 0.6 * normal(heads, 512)
    if style in ("flat", "constant"):
        return 0.1 * rows
    peaked = max(len(critical), heads // 2)
    for head in range(peaked):
        z = critical[head % len(critical)].float() - mu
        rows[head] = z / z.norm() * (math.log(keys) + 1.0) / (SCALE * z.norm())
    for head in range(peaked, peaked + max(2, heads // 8)):
        excess = math.log(keys) - max(float(sinks[head]), -2.0)
        rows[head] = -mu * excess / (SCALE * mu.dot(mu))
    return rows


def make_scenario(name, *steps):
    return Scenario(name, crc32(name.encode()), SimpleNamespace(), steps, ())


def keys_of(step, *, window=128, early=0):
    """Stored keys ``[M, 512]`` fp32 and which of them each row sees, ``[T, N]``, -1 where absent."""
    selection = step.selection
    tokens, entries = dsv4_reference.visible(step.ratio, step.positions, selection, window=window, early=early)
    index = torch.cat(
        [
            torch.where(tokens >= 0, tokens + step.token_base[step.request][:, None], -1),
            torch.where(entries >= 0, entries + step.entry_base[step.request][:, None] + len(step.tokens), -1),
        ],
        dim=1,
    )
    used, compact = torch.unique(index, return_inverse=True)
    bank = dsv4_reference.quantise_dequantise(torch.cat([step.tokens, step.entries])[used])
    return bank.float(), torch.where(index >= 0, compact, -1)


def run_kernel(step, *, sink=True, window=128, early=0, splits=2, bf16_weights=True):
    """Forward blocks of 64 keys, exp2, bf16 probabilities, fp32 splits that a combine merges: as a GPU kernel does."""
    bank, index = keys_of(step, window=window, early=early)
    log2e = 1.4426950408889634
    q = step.q.float()
    parts = []
    for part in index.chunk(splits, dim=1):
        acc = torch.zeros_like(q)
        peak = torch.full(q.shape[:2], -torch.inf)
        total = torch.zeros(q.shape[:2])
        for block in part.split(64, dim=1):
            keys = bank[block.clamp(min=0)] * (block >= 0)[..., None]
            scores = torch.einsum("thd,tnd->thn", q, keys) * (SCALE * log2e)
            scores = scores.masked_fill((block < 0)[:, None], -torch.inf)
            new = torch.maximum(peak, scores.amax(-1))
            base = new.nan_to_num(neginf=0.0)
            p = torch.exp2(scores - base[..., None])
            decay = torch.exp2(peak - base)
            total = total * decay + p.sum(-1)
            p = p.bfloat16().float() if bf16_weights else p
            acc = acc * decay[..., None] + torch.einsum("thn,tnd->thd", p, keys)
            peak = new
        parts.append((acc, peak, total))
    peak = torch.stack([part[1] for part in parts]).amax(0)
    weights = [torch.exp2(part[1] - peak) for part in parts]
    total = sum(w * part[2] for w, part in zip(weights, parts, strict=True))
    acc = sum(w[..., None] * part[0] for w, part in zip(weights, parts, strict=True))
    lse = (peak + torch.log2(total)) / log2e
    below = total + torch.exp2(step.sink * log2e - peak) if sink else total
    return (acc / below[..., None]).bfloat16(), lse


@pytest.fixture
def tolerances():
    return Tolerances(
        eager=Tolerance(0.05, 0.05),
        graph=Tolerance(0.1, 0.1),
        budget=Budget(
            baseline_factor=2.0, rounding=0.5, mean_rounding=0.125, cosine=5e-6, lse_factor=2.0, lse_rounding=64.0
        ),
    )


@pytest.fixture
def kit(tolerances):
    """The helpers of this file, and ``verdict(scenario, observations...)``."""

    def verdict(scenario, *observations, backend="under-test"):
        return judge(
            Case(id=scenario.case_id, kind="case"),
            scenario,
            observations,
            dsv4_reference,
            tolerances,
            backend_name=backend,
            device="cpu",
        )

    def observe(out_lse, step=0, leg="eager", graph=False):
        out, lse = out_lse
        return Observation(leg, step, out, lse, graph)

    def one(step, out_lse=None, name=None):
        """The verdict on a single step, answered by the kernel unless given."""
        return verdict(make_scenario(name or "a-case", step), observe(run_kernel(step) if out_lse is None else out_lse))

    return SimpleNamespace(
        scale=SCALE,
        step=make_step,
        scenario=make_scenario,
        kernel=run_kernel,
        observe=observe,
        verdict=verdict,
        one=one,
        keys=keys_of,
        replace=dataclasses.replace,
    )
