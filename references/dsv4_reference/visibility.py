"""Which logical keys a query row attends, from its ratio and its position alone.

The rule is DeepSeek-V4's (arXiv:2606.19348) as SGLang's backend builds it: a query at absolute position ``p`` attends

* the tokens of its sliding window, ``max(0, p - 127) .. p``, and
* compressed entries that are complete, i.e. whose last token is not after ``p``: entry ``j`` of ratio ``r`` covers
  tokens ``j * r .. j * r + r - 1``, so entries ``0 .. (p + 1) // r - 1``. Of these a C4 layer attends the indexer's
  choice, a C128 layer all. Entries that overlap the window are not left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_reference.geometry import RATIOS, WINDOW


def visible(
    ratio: int,
    positions: Tensor,
    selection: Tensor | None = None,
    *,
    window: int = WINDOW,
    early: int = 0,
) -> tuple[Tensor, Tensor]:
    """Logical keys that rows at ``positions`` attend: ``(window positions, compressed entries)``.

    Args:
        ratio: 0 (window only), 4 or 128.
        positions: int ``[T]``, absolute position of each row; a negative one sees nothing.
        selection: int ``[T, topk]``, request-local C4 entry ids, -1 padded, required for ratio 4 and ignored for the
            others. Ids of entries that are not complete yet are dropped: a row never sees its future.
        window: tokens in the window; other than 128 is a defect, for the judge's perturbations.
        early: entries beyond what is complete; other than 0 is a defect, for the same use.

    Returns:
        int64 ``[T, W]`` positions, newest first, and int64 ``[T, E]`` entry ids, -1 where absent. Columns that no row
        uses are left out, so W <= window and E may be 0. Reading these widths waits for the device once.

    Raises:
        ValueError: unknown ratio, or ratio 4 without a selection of matching rows.
    """
    if ratio not in RATIOS:
        raise ValueError(f"dsv4_reference.visible: ratio must be one of {RATIOS}, got {ratio}")
    if positions.dim() != 1:
        raise ValueError(f"dsv4_reference.visible: positions must be [T], got shape {tuple(positions.shape)}")
    positions = positions.to(torch.int64)
    back = torch.arange(window, device=positions.device)
    tokens = _used_columns((positions[:, None] - back).clamp(min=-1))
    if ratio == 0:
        return tokens, positions.new_empty(positions.shape[0], 0)

    complete = torch.div(positions + 1, ratio, rounding_mode="floor") + early
    if ratio == 4:
        if selection is None or selection.dim() != 2 or selection.shape[0] != positions.shape[0]:
            got = None if selection is None else tuple(selection.shape)
            raise ValueError(
                f"dsv4_reference.visible: ratio 4 needs the indexer's selection [{positions.shape[0]}, topk], got {got}"
            )
        entries = selection.to(torch.int64)
    else:
        most = int(complete.max().clamp(min=0)) if positions.numel() else 0
        entries = torch.arange(most, device=positions.device).expand(positions.shape[0], most)
    return tokens, _used_columns(torch.where((entries >= 0) & (entries < complete[:, None]), entries, -1))


def _used_columns(ids: Tensor) -> Tensor:
    return ids[:, (ids >= 0).any(dim=0)]
