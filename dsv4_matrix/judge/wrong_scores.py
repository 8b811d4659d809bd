"""What rows would have answered under another softmax scale, or over the short lists that a graph was captured with.

Both move every score sum a lot, so the log-sum-exp, which needs no values, tells which of many to look at: an output is
computed only where it fits in all heads. Sources: FlashMLA's interface takes 1 / sqrt(head dim of K) by default, which
was 576 (DeepSeek-V3's latent with its rope part); DeepSeek-V3's own scale is of its query heads, 128 + 64 wide; 448 is
DeepSeek-V4's key without its rope part. FlashAttention's kernels fold log2(e) into the scale and use exp2, where it
is easily left out or applied twice. SGLang captures over requests of length 1 and hands the real lengths to a replay
in the captured buffers; where they go into fresh ones (its pull request 26019 tells of that in this very backend) or
were taken as numbers, the kernel keeps those of the capture. It clamps compressed lengths to at least 1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from dsv4_matrix.judge.log_sums import holds_in_some_form

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4_matrix.judge.compare import Answer
    from dsv4_matrix.judge.truth import Oracle, Truth

#: Widths whose root a kernel may have taken, as above, and of the rope part alone.
_WIDTHS = (576, 512, 448, 192, 128, 64)
#: A pad request has length 1; the rows of a verify step and the steps of a draft chain come on top of it.
_CAPTURED = 8


def other_softmax_scales(oracle: Oracle, truth: Truth, answer: Answer) -> list[tuple[str, Tensor]]:
    """Name and output fp64 ``[1, H, 512]`` of one row under each softmax scale that its log-sum-exp speaks for."""
    own, index = oracle.step.softmax_scale, oracle.sight.index[truth.rows]
    products, step = _products(oracle, truth), oracle.step
    named = [(f"softmax scale 1/sqrt({width})", width**-0.5) for width in _WIDTHS]
    named += [
        ("no softmax scale", 1.0),
        ("softmax scale applied twice", own * own),
        ("log2(e) left out, as exp2 of scores meant for exp", own * math.log(2.0)),
        ("log2(e) in the scores of exp, or twice in those of exp2", own / math.log(2.0)),
    ]
    found = []
    for name, scale in named:
        lse = torch.logsumexp(products * scale, dim=-1)[None]
        if not math.isclose(scale, own, rel_tol=1e-6) and holds_in_some_form(truth, answer, lse, step.sink):
            output, _ = oracle.reference.attend(step.q[truth.rows], oracle.stored, index, step.sink, scale)
            found.append((name, output))
    return found


def captured_lengths(oracle: Oracle, truth: Truth, answer: Answer) -> list[tuple[str, Tensor]]:
    """Name and output fp64 ``[1, H, 512]`` of one row whose window is as long as when a graph was captured.

    That is 1 to 8 tokens from either end, since a window is listed from its oldest token on or from its newest, with
    no compressed entry or the first of the list or, where only the window's length is kept, all of them.
    """
    index, step = oracle.sight.index[truth.rows], oracle.step
    present = index[0] >= 0
    # Keys of one request are numbered by position: sorted columns go from the oldest token to the newest.
    columns = present[: oracle.sight.window].nonzero()[:, 0]
    tokens = columns[index[0, columns].argsort()].tolist()
    entries = present.nonzero()[:, 0][len(tokens) :].tolist()
    scores = torch.full((index.shape[1], step.q.shape[1]), -torch.inf, dtype=torch.float64, device=index.device)
    scores[present] = (_products(oracle, truth) * step.softmax_scale).T
    found = []
    for count in range(1, min(_CAPTURED, len(tokens) - 1) + 1):
        for end, kept in (("oldest", tokens[:count]), ("newest", tokens[-count:])):
            what = f"{end} token" if count == 1 else f"{count} {end} tokens"
            listed = [(f"only the window's {what} seen", kept)]
            if entries:
                listed.append(
                    (f"only the window's {what} and the list's first compressed entry seen", kept + entries[:1])
                )
            if len(entries) > 1:
                listed.append((f"only the window's {what} and all compressed entries seen", kept + entries))
            for name, seen in listed:
                lse = torch.logsumexp(scores[seen], dim=0)[None]
                if holds_in_some_form(truth, answer, lse, step.sink):
                    output, _ = oracle.reference.attend(
                        step.q[truth.rows], oracle.stored, index[:, seen], step.sink, step.softmax_scale
                    )
                    found.append((f"{name}, as under lengths kept from the capture", output))
    return found


def _products(oracle: Oracle, truth: Truth) -> Tensor:
    """fp64 ``[H, keys]``: one row's queries times the keys that it sees, in the order of its index."""
    index = oracle.sight.index[truth.rows][0]
    return oracle.step.q[truth.rows][0].to(torch.float64) @ oracle.stored[index[index >= 0]].T
