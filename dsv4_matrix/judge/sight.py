"""What each row of a step sees, as rows of one small bank of keys, and the one-key mistakes a backend could make.

Positions and entry ids come from the reference; this module only finds the keys that they name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4_matrix.cases.scenario import Scenario, Step
    from dsv4_matrix.protocol import Reference

WINDOW = 128
#: A sink at or below this is a no-op in fp32: exp(sink - lse) is zero for every lse that a case can have.
NO_SINK = -1e20


class Kind(StrEnum):
    """Kinds of perturbation. Each that applies to a case must be visible in its output."""

    DROP = "key dropped"
    ADD = "key added"
    SHORT = "window 127"
    LONG = "window 129"
    EARLY = "compressed entry early"
    SINK = "sink left out"


@dataclass(frozen=True)
class Edit:
    """One key too few (``sign`` -1) or too many (+1) a row: ``key`` int64 ``[T]`` into the bank, -1 where none."""

    kind: Kind
    name: str
    sign: int
    key: Tensor


@dataclass(frozen=True)
class Sight:
    """A step's keys.

    Attributes:
        bank: bf16 ``[M, 512]``, every key that a row sees or that an edit adds, once.
        index: int64 ``[T, N]`` into it, -1 where absent: the window, then the compressed entries in the list's order.
        window: columns of ``index`` that are of the window.
        edits: the one-key mistakes that change what at least one row sees.
    """

    bank: Tensor
    index: Tensor
    window: int
    edits: tuple[Edit, ...]


def sight_of(step: Step, reference: Reference) -> Sight:
    """The keys of ``step``; waits for the device a few times, whatever the number of rows."""
    tokens, entries = reference.visible(step.ratio, step.positions, step.selection)
    index = torch.cat([_token_key(step, tokens), _entry_key(step, entries)], dim=1)
    edits, keys = _edits(step, reference, tokens, entries)

    wanted = torch.cat([index.flatten(), keys.flatten()])
    used = torch.unique(wanted[wanted >= 0])
    of_entries = used >= step.tokens.shape[0]
    bank = torch.cat([step.tokens[used[~of_entries]], step.entries[used[of_entries] - step.tokens.shape[0]]])

    def compact(key: Tensor) -> Tensor:
        return torch.where(key >= 0, torch.searchsorted(used, key.contiguous()), -1)

    present = (keys >= 0).any(dim=0).tolist()
    found = zip(edits, compact(keys).unbind(dim=1), present, strict=True)
    return Sight(
        bank=bank,
        index=compact(index),
        window=tokens.shape[1],
        edits=tuple(Edit(kind, name, sign, key) for (kind, name, sign), key, some in found if some),
    )


def applicable_kinds(scenario: Scenario) -> frozenset[Kind]:
    """The kinds of perturbation that change what some row of ``scenario`` sees.

    A cell needs at least one case for each kind that its ratio allows: SHORT and LONG need a position of at least 127
    and 128, EARLY a compressed ratio, SINK a sink above -1e20.
    """
    kinds = set()
    for step in scenario.steps:
        if step.positions.numel() == 0:
            continue
        last = int(step.positions.max())
        kinds |= {Kind.DROP, Kind.ADD}
        kinds |= {Kind.SHORT} if last >= WINDOW - 1 else set()
        kinds |= {Kind.LONG} if last >= WINDOW else set()
        kinds |= {Kind.EARLY} if step.ratio else set()
        kinds |= {Kind.SINK} if bool((step.sink > NO_SINK).any()) else set()
    return frozenset(kinds)


#: An edit without its key: kind, name and sign.
_Candidate = tuple[Kind, str, int]


def _edits(step: Step, reference: Reference, tokens: Tensor, entries: Tensor) -> tuple[list[_Candidate], Tensor]:
    """All candidates, and their keys as global ids, int64 ``[T, candidates]``; some may apply to no row."""
    newest, oldest = _newest(tokens), _oldest(tokens)
    shorter = _oldest(reference.visible(0, step.positions, window=WINDOW - 1)[0])
    longer = _oldest(reference.visible(0, step.positions, window=WINDOW + 1)[0])
    falls_out, comes_in = shorter > oldest, longer < oldest

    edits: list[_Candidate] = [
        (Kind.DROP, "newest token dropped", -1),
        (Kind.DROP, "oldest token dropped", -1),
        (Kind.ADD, "next token seen", 1),
        (Kind.SHORT, str(Kind.SHORT), -1),
        (Kind.LONG, str(Kind.LONG), 1),
    ]
    positions = [
        newest,
        torch.where((oldest < newest) & ~falls_out, oldest, -1),
        torch.where(newest >= 0, newest + 1, -1),
        torch.where(falls_out, oldest, -1),
        torch.where(comes_in, longer, -1),
    ]
    keys = _token_key(step, torch.stack(positions, dim=1))
    if step.ratio:
        # The indexer may not have offered the entry that is about to be complete: a backend that counts one too many
        # reads whatever stands there, so the perturbation offers it.
        offered = step.selection
        if offered is not None:
            next_entry = torch.div(step.positions + 1, step.ratio, rounding_mode="floor")
            offered = torch.cat([offered, next_entry[:, None].to(offered.dtype)], dim=1)
        early = _newest(reference.visible(step.ratio, step.positions, offered, early=1)[1])
        first, last = _oldest(entries), _newest(entries)
        edits += [
            (Kind.DROP, "oldest entry dropped", -1),
            (Kind.DROP, "newest entry dropped", -1),
            (Kind.EARLY, str(Kind.EARLY), 1),
        ]
        numbers = [first, torch.where(last > first, last, -1), torch.where(early > last, early, -1)]
        keys = torch.cat([keys, _entry_key(step, torch.stack(numbers, dim=1))], dim=1)
    return edits, keys


def _newest(ids: Tensor) -> Tensor:
    """int64 ``[T]``: the largest id of each row, -1 if it has none."""
    return ids.amax(dim=1) if ids.shape[1] else ids.new_full(ids.shape[:1], -1)


def _oldest(ids: Tensor) -> Tensor:
    """int64 ``[T]``: the smallest id of each row, -1 if it has none."""
    if not ids.shape[1]:
        return ids.new_full(ids.shape[:1], -1)
    largest = torch.iinfo(torch.int64).max
    smallest = torch.where(ids >= 0, ids, largest).amin(dim=1)
    return torch.where(smallest == largest, -1, smallest)


def _token_key(step: Step, positions: Tensor) -> Tensor:
    """Global ids of request-local positions ``[T, W]``; -1 where absent or past the request's last (decoy) token."""
    return _global(step.request, step.token_base, positions)


def _entry_key(step: Step, entries: Tensor) -> Tensor:
    """The same for entries ``[T, E]``, which are numbered after all tokens."""
    key = _global(step.request, step.entry_base, entries)
    return torch.where(key >= 0, key + step.tokens.shape[0], -1)


def _global(request: Tensor, base: Tensor, ids: Tensor) -> Tensor:
    key = base[request][:, None] + ids
    return torch.where((ids >= 0) & (key < base[request + 1][:, None]), key, -1)
