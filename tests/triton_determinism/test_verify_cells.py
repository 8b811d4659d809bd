"""Chain verification behind the verify cells: attention rows, a fixed projection, and the three rules, to the bit.

Eagerly and inside the captured step of the cell itself, whose coins are drawn into static buffers from static seeds and
the batch's committed lengths. Verdicts and coins must be those of the reference for the same distributions, and the
graph's must be the eager ones, whatever pad requests stand behind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from dsv4_reference import chain_verify as reference
from dsv4_reference.coins import verify_coins
from dsv4_triton import DSV4TritonBackend
from dsv4_triton.chain_verify import VerifyBuffers, row_argmax, verify_classic, verify_greedy, verify_target_only
from dsv4_triton.coins import CoinBuffers, draw_coins
from dsv4_triton.logprobs import log_softmax

from dsv4_matrix.admission import Rule, not_repeatable
from dsv4_matrix.cases.build import build_scenario
from dsv4_matrix.cases.poison import poison_pools
from dsv4_matrix.cases.streams import stream
from dsv4_matrix.declaration import find_matrix, load_matrix
from dsv4_matrix.modes.capture import capture
from dsv4_matrix.modes.eager import prepare
from dsv4_matrix.modes.static_step import StaticStep
from dsv4_matrix.modes.step import StepInputs, run_captured_step, run_eager_step
from dsv4_matrix.modes.trace import Notebook
from dsv4_matrix.protocol import ForwardMode

MATRIX = load_matrix(find_matrix())
VERIFY = {
    case.id: case
    for case in MATRIX.cases()
    if case.cell
    and case.variant
    and case.variant.forward == "target-verify"
    and len(set(case.variant.extend_lens)) == 1
}
ON_CPU = ("r0-verify-cg-chain-2-window-edge", "r4-verify-cg-chain-2-emission-between", "r128-verify-eager-chain-3")
RULES = ("greedy", "target_only", "classic")
VOCABULARY, TAPS = 24, 6


@dataclass
class Chain:
    """Device tensors of one verify batch behind its attention: inputs, coins and verdicts."""

    tokens: torch.Tensor  # int64 [bs, D]
    draft: torch.Tensor  # fp32 [bs, D - 1, V]
    seeds: torch.Tensor  # int64 [bs]
    taps: torch.Tensor  # of the projection
    coins: CoinBuffers
    out: VerifyBuffers

    @classmethod
    def of(cls, bs, width, q):
        device = q.device

        def zeros(*shape, dtype):
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            zeros(bs, width, dtype=torch.int64),
            zeros(bs, width - 1, VOCABULARY, dtype=torch.float32),
            zeros(bs, dtype=torch.int64),
            projection(q, device),
            CoinBuffers.allocate(bs, width, device),
            VerifyBuffers.allocate(bs, width, device),
        )

    def verify(self, rule, rows, lengths, seeded=True):
        """Coins and verdict for attention ``rows`` bf16 ``[bs * D, H, 512]``; returns the distributions they used."""
        bs, width = self.tokens.shape
        logits = projected(rows, self.taps)
        target = log_softmax(logits).exp().view(bs, width, VOCABULARY)
        draw_coins(self.seeds if seeded else None, lengths, self.coins)
        if rule == "greedy":
            best = torch.empty(bs * width, dtype=torch.int32, device=rows.device)
            row_argmax(logits, best)
            verify_greedy(self.tokens, best.view(bs, width), self.out)
        elif rule == "target_only":
            verify_target_only(self.tokens, target, self.coins, self.out)
        else:
            verify_classic(self.tokens, target, self.draft, self.coins, self.out)
        return logits, target


def projection(rows, device):
    """``TAPS`` elements of a row for each logit, int64 ``[TAPS, V]``; made before a graph, which may not copy them."""
    elements = rows.shape[1] * rows.shape[2]
    taps = torch.randperm(elements, generator=torch.Generator().manual_seed(5))[: VOCABULARY * TAPS]
    return taps.view(TAPS, VOCABULARY).to(device)


def projected(rows, taps):
    """fp32 ``[T, V]``: each logit a sum of a few elements in one order, so that it depends on nothing but its row."""
    flat = rows.float().flatten(1)
    logits = torch.zeros(len(rows), VOCABULARY, device=rows.device)
    for column in taps:
        logits = logits + flat.index_select(1, column) * 4
    return logits


def proposed(target, seed):
    """Draft tokens and their distribution: near the target's, so that some are kept and some are not."""
    generator = stream(seed, "drafts")
    probabilities = target.cpu().numpy()
    bs, width, _ = probabilities.shape
    noise = generator.dirichlet(np.full(VOCABULARY, 0.3), (bs, width - 1))
    draft = (0.8 * probabilities[:, :-1] + 0.2 * noise).astype(np.float32)
    tokens = np.zeros((bs, width), np.int64)
    lucky = generator.random((bs, width - 1)) < 0.7
    tokens[:, 1:] = np.where(lucky, probabilities[:, :-1].argmax(-1), draft.argmin(-1))
    return torch.from_numpy(tokens), torch.from_numpy(draft)


def expected(rule, chain, logits, target, seeds, lengths, bs):
    """The reference's verdict on the first ``bs`` requests, and its coins."""
    width = chain.tokens.shape[1]
    tokens, draft = chain.tokens[:bs].cpu().numpy(), chain.draft[:bs].cpu().numpy()
    reject, final = verify_coins(seeds[:bs].cpu().numpy(), lengths[:bs].cpu().numpy(), width)
    if rule == "greedy":
        verdict = reference.verify_greedy(tokens, logits.view(-1, width, VOCABULARY)[:bs].cpu().numpy())
    elif rule == "target_only":
        verdict = reference.verify_target_only(tokens, target[:bs].cpu().numpy(), reject, final)
    else:
        verdict = reference.verify_classic(tokens, target[:bs].cpu().numpy(), draft, reject, final)
    return verdict, reject, final


def differs(chain, verdict, reject, final, bs):
    """What of the first ``bs`` requests is not the reference's, by name."""
    width = chain.tokens.shape[1]
    pairs = {
        "accept_index": (chain.out.accept_index[:bs], verdict.accept_index),
        "counts": (chain.out.counts[:bs], verdict.counts),
        "predict": (chain.out.predict[: bs * width], verdict.predict),
        "rejection coins": (chain.coins.reject[:bs].view(torch.int32), reject.view(np.int32)),
        "final coins": (chain.coins.final[:bs].view(torch.int32), final.view(np.int32)),
    }
    return [name for name, (got, want) in pairs.items() if not np.array_equal(got.cpu().numpy(), want)]


class Served:
    """A verify case over one backend, eagerly or captured."""

    def __init__(self, case, device):
        self.case, self.device = case, device
        self.scenario = build_scenario(case, MATRIX, device)
        self.steps = [
            number
            for number, placement in enumerate(self.scenario.placements)
            if placement.batch.forward_mode == ForwardMode.TARGET_VERIFY and placement.batch.batch_size
        ]

    def backend(self):
        backend = DSV4TritonBackend(self.scenario.runner)
        poison_pools(backend.kv_buffers())
        return backend

    def bring_up(self, backend, number):
        step, placement = self.scenario.steps[number], self.scenario.placements[number]
        prepare(backend, self.scenario.runner, placement, step.ratio, Notebook(), "history")
        return step, placement

    def seeds(self, bs, salt):
        drawn = stream(self.case.seed, "request seeds", salt).integers(-(2**63), 2**63, bs)
        return torch.from_numpy(drawn).to(self.device)

    def eager(self, rule, number):
        """A verified batch: its chain, and what the reference needs."""
        backend = self.backend()
        step, placement = self.bring_up(backend, number)
        rows, _ = run_eager_step(backend, StepInputs.of(step, placement))
        bs, width = placement.batch.batch_size, step.row_counts[0]
        chain = Chain.of(bs, width, step.q)
        chain.seeds.copy_(self.seeds(bs, number))
        target = log_softmax(projected(rows, chain.taps)).exp().view(bs, width, VOCABULARY)
        for buffer, values in zip((chain.tokens, chain.draft), proposed(target, self.case.seed), strict=True):
            buffer.copy_(values)
        logits, target = chain.verify(rule, rows, placement.batch.seq_lens)
        return chain, logits, target, placement.batch.seq_lens


def cases(device, mode=None):
    chosen = ON_CPU if device == "cpu" else sorted(VERIFY)
    return [VERIFY[name] for name in chosen if mode in (None, VERIFY[name].cell.mode)]


@pytest.mark.parametrize("rule", RULES)
def test_eager_verdicts_are_the_references(device, rule):
    kept = []
    for case in cases(device):
        served = Served(case, device)
        for number in served.steps[: 1 if device == "cpu" else None]:
            chain, logits, target, lengths = served.eager(rule, number)
            bs = len(lengths)
            wanted = expected(rule, chain, logits, target, chain.seeds, lengths, bs)
            assert differs(chain, *wanted, bs) == [], (case.id, number)
            kept += wanted[0].counts.tolist()
    assert max(kept) > 0, "no draft was ever kept"
    if rule == "greedy":
        assert min(kept) < max(kept), "every draft was kept"


def captured_verdicts(case, device, rule, lengths_of=lambda batch: batch.seq_lens):
    """``(case, step, what differs)`` of every replay of one capture against the reference and the eager run."""
    served = Served(case, device)
    scenario, variant = served.scenario, case.variant
    step = scenario.steps[served.steps[0]]
    width = step.row_counts[0]
    bucket = max(variant.bucket, *(scenario.placements[n].batch.batch_size for n in served.steps))
    static = StaticStep(
        step, bucket, width, ForwardMode.TARGET_VERIFY, strided_q=variant.q_layout == "strided", on_host=True
    )
    backend, chain, batch = served.backend(), Chain.of(bucket, width, step.q), static.inputs.batch
    backend.init_cuda_graph_state(bucket, bucket * width)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    used = []

    def whole_step():
        rows, lse = run_captured_step(backend, static.inputs)
        used[:] = chain.verify(rule, rows, lengths_of(batch))
        return ((rows, lse), (chain.out.predict, chain.out.counts))

    graph = capture(whole_step, after_warmup=backend.on_after_cuda_graph_warmup, device=device)
    found = []
    for number in served.steps:
        eager, *_ = served.eager(rule, number)
        step, placement = served.bring_up(backend, number)
        static.fill(step, placement)
        bs = placement.batch.batch_size
        for name in ("tokens", "draft", "seeds"):
            getattr(chain, name).zero_()
            getattr(chain, name)[:bs] = getattr(eager, name)
        for tensor in (chain.out.predict, chain.out.accept_index, chain.out.counts):
            tensor.fill_(-7)
        chain.coins.reject.fill_(torch.nan)
        chain.coins.final.fill_(torch.nan)
        backend.init_forward_metadata_out_graph(batch)
        graph.replay()
        wanted = expected(rule, chain, *used, chain.seeds, placement.batch.seq_lens, bs)
        found += [(number, "reference", name) for name in differs(chain, *wanted, bs)]
        coins = eager.coins.reject.cpu().numpy(), eager.coins.final.cpu().numpy()
        verdict = reference.ChainVerdict(
            predict=eager.out.predict.cpu().numpy(),
            accept_index=eager.out.accept_index.cpu().numpy(),
            counts=eager.out.counts.cpu().numpy(),
        )
        found += [(number, "eager", name) for name in differs(chain, verdict, *coins, bs)]
    return found


@pytest.mark.parametrize("rule", RULES)
def test_captured_verdicts_are_the_references_and_the_eager_ones(device, rule):
    for case in cases(device, "verify-cg")[: 1 if device == "cpu" and rule != "classic" else None]:
        assert captured_verdicts(case, device, rule) == [], case.id


def test_coins_of_padded_positions_are_seen(device):
    """The defect: coins at the positions of the batch's rows, not at the committed lengths."""
    case = cases(device, "verify-cg")[0]
    found = captured_verdicts(case, device, "target_only", lambda batch: batch.seq_lens + 1)
    assert {name for _, _, name in found} >= {"rejection coins", "final coins"}


def test_a_draft_from_the_global_generator_is_reported_and_does_not_pass(device):
    """Classic rejection reads the proposal, so seeded coins do not make its tokens repeatable."""
    served = Served(cases(device)[0], device)
    chain, _, target, _ = served.eager("classic", served.steps[0])
    verdicts = set()
    for _ in range(8):
        uniform = torch.rand(target[:, :-1].shape, device=device)
        gumbel = target[:, :-1].clamp(min=1e-30).log() - (-uniform.clamp(1e-30).log()).log()
        chain.tokens[:, 1:] = gumbel.argmax(-1)
        verify_classic(chain.tokens, target, target[:, :-1].contiguous(), chain.coins, chain.out)
        verdicts.add(tuple(chain.out.predict.tolist()))
    assert len(verdicts) > 1, "the draft that was drawn anew changed nothing"
    said = not_repeatable(Rule.CLASSIC, coins_seeded=True, draft_sampled=True, draft_seeded=False)
    assert said.startswith("nondeterministic: classic")
    assert not_repeatable(Rule.CLASSIC, coins_seeded=True, draft_sampled=False, draft_seeded=False) == ""
