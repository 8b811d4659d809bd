"""Coins and verdicts inside a captured step: written into static buffers, followed by replays with other seeds."""

from __future__ import annotations

import numpy as np
import torch
from dsv4_reference import chain_verify as reference
from dsv4_reference import coins as reference_coins
from dsv4_triton.chain_verify import VerifyBuffers, verify_classic, verify_target_only
from dsv4_triton.coins import CoinBuffers, draw_coins

from dsv4_matrix.modes.capture import capture

BS, WIDTH, VOCABULARY = 6, 4, 24


def distributions(generator, rows):
    return generator.dirichlet(np.full(VOCABULARY, 0.2), (BS, rows)).astype(np.float32)


def captured(rule, device, seeds_read_now=False):
    """Static inputs and outputs of a captured coin draw and verify."""
    static = {
        "seeds": torch.zeros(BS, dtype=torch.int64, device=device),
        "lengths": torch.zeros(BS, dtype=torch.int64, device=device),
        "tokens": torch.zeros(BS, WIDTH, dtype=torch.int64, device=device),
        "target": torch.zeros(BS, WIDTH, VOCABULARY, device=device),
        "draft": torch.zeros(BS, WIDTH - 1, VOCABULARY, device=device),
    }
    coins, out = CoinBuffers.allocate(BS, WIDTH, device), VerifyBuffers.allocate(BS, WIDTH, device)

    def step():
        seeds = static["seeds"].clone() if not seeds_read_now else torch.full_like(static["seeds"], 77)
        draw_coins(seeds, static["lengths"], coins)
        if rule == "classic":
            verify_classic(static["tokens"], static["target"], static["draft"], coins, out)
        else:
            verify_target_only(static["tokens"], static["target"], coins, out)
        return ((out.predict, out.counts),)

    return static, coins, out, capture(step, after_warmup=lambda: None, device=device)


def replays_right(rule, device, generator, **defect):
    """Whether three replays, each with its own seeds, lengths and inputs, give the reference's coins and verdicts."""
    static, coins, out, graph = captured(rule, device, **defect)
    right = True
    for _ in range(3):
        seeds, lengths = generator.integers(-(2**63), 2**63, BS), generator.integers(1, 2**33, BS)
        target, draft = distributions(generator, WIDTH), distributions(generator, WIDTH - 1)
        draft = (0.7 * target[:, :-1] + 0.3 * draft).astype(np.float32)
        tokens = np.zeros((BS, WIDTH), dtype=np.int64)
        tokens[:, 1:] = draft.argmax(axis=-1)
        new = {"seeds": seeds, "lengths": lengths, "tokens": tokens, "target": target, "draft": draft}
        for name, value in new.items():
            static[name].copy_(torch.from_numpy(value))
        for tensor in (out.predict, out.accept_index, out.counts):
            tensor.fill_(-7)
        coins.reject.fill_(torch.nan)
        coins.final.fill_(torch.nan)
        graph.replay()
        drawn = reference_coins.verify_coins(seeds, lengths, WIDTH)
        if rule == "classic":
            verdict = reference.verify_classic(tokens, target, draft, *drawn)
        else:
            verdict = reference.verify_target_only(tokens, target, *drawn)
        right &= np.array_equal(coins.reject.cpu().numpy().view(np.uint32), drawn[0].view(np.uint32))
        right &= np.array_equal(coins.final.cpu().numpy().view(np.uint32), drawn[1].view(np.uint32))
        right &= np.array_equal(out.predict.cpu().numpy(), verdict.predict)
        right &= np.array_equal(out.accept_index.cpu().numpy(), verdict.accept_index)
        right &= np.array_equal(out.counts.cpu().numpy(), verdict.counts)
    return right


def test_replays_equal_the_reference(device, generator):
    for rule in ("target-only", "classic"):
        assert replays_right(rule, device, generator)


def test_seeds_frozen_into_the_graph_are_caught(device, generator):
    assert not replays_right("classic", device, generator, seeds_read_now=True)
