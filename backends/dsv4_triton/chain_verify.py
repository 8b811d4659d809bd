"""Chain verification on the device: which drafts are kept and which token follows, equal bit for bit on every device.

Slots 0 .. D - 1 of a request are its chain, slot 0 the last committed token; ``target[b, j]`` is the distribution after
slots 0 .. j, ``draft[b, j]`` what slot j + 1 was drawn from. Step j = 1 .. D - 1 reads rejection coin j - 1:

    greedy       kept while slot j equals argmax(target[j - 1]), lowest index on ties; no coins
    target only  kept while coin <= p / threshold_acc or p >= threshold_single      (so a coin of 0 keeps p = 0)
    classic      kept while coin * q < p, strictly; a NaN q counts as 0

The final token is drawn from the last row that was reached (target; less the refused token; or max(target - draft, 0)):
the first index whose running fp32 sum exceeds coin * total. Where no index does, target only takes the last one with
mass, classic the last of the vocabulary. NaN masses count as 0. Rules: arXiv:2211.17192, SGLang's chain kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from dsv4_triton.chain_kernels import argmax_kernel, greedy_kernel, sampling_kernel
from dsv4_triton.coins import CoinBuffers
from dsv4_triton.numerics import INTERPRETED
from dsv4_triton.target import target_of

_UNROLL = 16
_SMALLEST_THRESHOLD_ACC = 1e-9


@dataclass(frozen=True)
class VerifyBuffers:
    """Where verdicts lie; addresses may be captured. All int32 and contiguous; -1 where nothing is defined.

    Attributes:
        predict: ``[bs * D]``, the token that follows each kept slot; slot (b, j) has index b * D + j.
        accept_index: ``[bs, D]``, indices of the kept slots in order, the root first.
        counts: ``[bs]``, kept drafts without the root.
    """

    predict: Tensor
    accept_index: Tensor
    counts: Tensor

    @classmethod
    def allocate(cls, bs: int, draft_token_num: int, device: torch.device | str) -> VerifyBuffers:
        def filled(*shape: int) -> Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        return cls(filled(bs * draft_token_num), filled(bs, draft_token_num), filled(bs))


def row_argmax(values: Tensor, out: Tensor) -> None:
    """``out`` int32 ``[R]`` = index of the largest of each row of ``values`` ``[R, V]``, fp32, bf16 or fp16.

    Lowest index on ties; NaN counts as -inf, and a row of nothing else gives 0.
    """
    _expect("row_argmax", values.dim() == 2 and values.shape[1] > 0 and values.stride(1) == 1, "values", "[R, V >= 1]")
    _expect("row_argmax", out.dtype == torch.int32 and out.shape == values.shape[:1], "out", "int32 [R]")
    target_of(values.device)
    if values.shape[0]:
        argmax_kernel[(values.shape[0],)](
            values, values.stride(0), values.shape[1], out, BLOCK=1024, num_warps=4, enable_fp_fusion=False
        )


def verify_greedy(tokens: Tensor, target_tokens: Tensor, out: VerifyBuffers) -> None:
    """Greedy verdict of ``tokens`` int ``[bs, D]`` against the target's choice (``row_argmax``) int32 ``[bs, D]``."""
    _check(tokens, out, "verify_greedy")
    bs, width = tokens.shape
    _expect(
        "verify_greedy",
        target_tokens.shape == tokens.shape and target_tokens.dtype == torch.int32 and target_tokens.is_contiguous(),
        "target_tokens",
        "contiguous int32 [bs, D]",
    )
    if bs:
        greedy_kernel[(bs,)](
            tokens, target_tokens, out.predict, out.accept_index, out.counts, width,
            SLOTS=triton.next_power_of_2(width), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip


def verify_target_only(
    tokens: Tensor,
    target: Tensor,
    coins: CoinBuffers,
    out: VerifyBuffers,
    *,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> None:
    """Target-only verdict: ``tokens`` int ``[bs, D]``, ``target`` fp32 ``[bs, D, V]``, ``coins`` of ``[bs, D]``."""
    _check(tokens, out, "verify_target_only")
    _check_distributions(tokens, target, None, coins, "verify_target_only")
    threshold_acc = max(threshold_acc, _SMALLEST_THRESHOLD_ACC)
    launch_sampling(tokens, target, None, coins, out, threshold_single, threshold_acc)


def verify_classic(tokens: Tensor, target: Tensor, draft: Tensor, coins: CoinBuffers, out: VerifyBuffers) -> None:
    """Classic rejection: as ``verify_target_only`` with the proposal ``draft`` fp32 ``[bs, D - 1, V]``."""
    _check(tokens, out, "verify_classic")
    _check_distributions(tokens, target, draft, coins, "verify_classic")
    launch_sampling(tokens, target, draft, coins, out)


def launch_sampling(
    tokens: Tensor,
    target: Tensor,
    draft: Tensor | None,
    coins: CoinBuffers,
    out: VerifyBuffers,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    whole: bool = bool(INTERPRETED),
) -> None:
    """The kernel of the two sampling rules (classic if there is a draft), unchecked; ``whole``: interpreter's form."""
    bs, width = tokens.shape
    vocabulary = target.shape[2]
    if bs:
        sampling_kernel[(bs,)](
            tokens, target, target if draft is None else draft, coins.reject, coins.final,
            out.predict, out.accept_index, out.counts, width, vocabulary, threshold_single, threshold_acc,
            CLASSIC=draft is not None, SLOTS=triton.next_power_of_2(width), UNROLL=_UNROLL,
            WHOLE=triton.next_power_of_2(vocabulary) if whole else 0, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip


def _check(tokens: Tensor, out: VerifyBuffers, where: str) -> None:
    integer = tokens.dtype in (torch.int32, torch.int64)
    _expect(where, tokens.dim() == 2 and tokens.shape[1] >= 1, "tokens", "[bs, D >= 1]")
    _expect(where, integer and tokens.is_contiguous(), "tokens", "contiguous int32 or int64")
    bs, width = tokens.shape
    for name, tensor, shape in (
        ("predict", out.predict, (bs * width,)),
        ("accept_index", out.accept_index, (bs, width)),
        ("counts", out.counts, (bs,)),
    ):
        fits = tensor.shape == shape and tensor.dtype == torch.int32 and tensor.is_contiguous()
        _expect(where, fits, name, f"contiguous int32 {list(shape)}")
    target_of(tokens.device)


def _check_distributions(tokens: Tensor, target: Tensor, draft: Tensor | None, coins: CoinBuffers, where: str) -> None:
    bs, width = tokens.shape
    vocabulary = target.shape[-1]
    for name, tensor, shape in (
        ("target", target, (bs, width, vocabulary)),
        ("draft", draft, (bs, width - 1, vocabulary)),
    ):
        if tensor is not None:
            fits = tensor.shape == shape and tensor.dtype == torch.float32 and tensor.is_contiguous() and vocabulary > 0
            _expect(where, fits, name, f"contiguous float32 {list(shape)}")
    _expect(where, coins.reject.shape == tokens.shape, "coins.reject", f"[{bs}, {width}] (CoinBuffers.rows)")


def _expect(where: str, holds: bool, name: str, supported: str) -> None:
    if not holds:
        raise ValueError(f"dsv4_triton.{where}: {name} is not {supported}")
