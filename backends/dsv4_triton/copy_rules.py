"""How a metadata object is brought up to date without losing the tensors that a captured graph reads.

Every dataclass field is under exactly one rule, so that a new field cannot be forgotten: *equal* (must already agree),
*copy* (the value moves, storage stays), *assign* (the reference moves) or *keep* (left alone).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch


@dataclass(frozen=True)
class CopyRules:
    """One rule for each field name."""

    equal: tuple[str, ...] = ()
    copy: tuple[str, ...] = ()
    assign: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()

    def check_partition(self, cls: type) -> None:
        """AssertionError unless the rules name every field of dataclass ``cls`` exactly once."""
        named = (*self.equal, *self.copy, *self.assign, *self.keep)
        declared = {field.name for field in fields(cls)}
        twice = sorted({name for name in named if named.count(name) > 1})
        if set(named) != declared or twice:
            raise AssertionError(
                f"{cls.__name__}: copy rules must name every field once; missing {sorted(declared - set(named))}, "
                f"unknown {sorted(set(named) - declared)}, twice {twice}"
            )

    def apply(self, dst: Any, src: Any) -> None:
        """Bring ``dst`` up to ``src``. All equalities are checked before anything is written.

        AssertionError where the types or an equal field differ, or a tensor would have to appear in ``dst``;
        TypeError where it would have to disappear.
        """
        owner = type(dst).__name__
        if type(src) is not type(dst):
            raise AssertionError(f"{owner}.copy_: got a {type(src).__name__}, expected a {owner}")
        for name in self.equal:
            have, want = getattr(dst, name), getattr(src, name)
            if have != want:
                raise AssertionError(f"{owner}.copy_: {name} is {have!r} here and {want!r} in the source")
        pairs = [(name, getattr(dst, name), getattr(src, name)) for name in self.copy]
        for name, have, new in pairs:
            _check_copy(owner, name, have, new)
        for _, have, new in pairs:
            if have is not None:
                have.copy_(new)
        for name in self.assign:
            setattr(dst, name, assign_scheduler(getattr(dst, name), getattr(src, name)))


def _check_copy(owner: str, name: str, have: torch.Tensor | None, new: torch.Tensor | None) -> None:
    if have is None and new is not None:
        raise AssertionError(f"{owner}.copy_: {name} is None here, so the source's tensor has no storage to go to")
    if have is not None and new is None:
        raise TypeError(f"{owner}.copy_: {name} is a tensor here and None in the source; copy_ takes a tensor")
    if have is not None and new is not None and have.shape != new.shape:
        raise AssertionError(
            f"{owner}.copy_: {name} has shape {list(have.shape)} here and {list(new.shape)} in the source"
        )


def assign_scheduler(have: Any, new: Any) -> Any:
    """The object to hold after assigning ``new`` over ``have``.

    A FlashMLA scheduler that is initialised has buffers whose addresses a graph may hold: it is kept if the new one
    is still empty, and refilled in place if the shapes agree. Anything else is replaced.
    """
    if have is None or not hasattr(have, "tile_scheduler_metadata") or type(new) is not type(have):
        return new
    tiles, splits = have.tile_scheduler_metadata, have.num_splits
    if tiles is None:
        return new
    if new.tile_scheduler_metadata is None:
        return have
    if tiles.shape == new.tile_scheduler_metadata.shape and splits.shape == new.num_splits.shape:
        tiles.copy_(new.tile_scheduler_metadata)
        splits.copy_(new.num_splits)
        return have
    return new
