"""A graph on a CPU: one step recorded as a tape and run again, under the contract of a CUDA graph.

Tensors are frozen by address and everything else by value: an operator is run again on the very tensors that it was
recorded with, and its results are copied into the recorded results; a kernel launch keeps its scalars and its grid.
Views and allocations are not run again. So a backend that builds new metadata tensors at replay, or keeps a length in a
Python number, is as wrong here as on a GPU. Fresh floating-point memory is NaN before each replay, as the contents of a
graph's private memory are undefined until the graph writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dsv4_matrix.modes.host_sync import SyncWatch

aten = torch.ops.aten

_ALLOCATIONS = frozenset(
    {
        aten.empty.memory_format,
        aten.empty.out,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)


class RecordedStep:
    """A step captured on a CPU: ``outputs`` are its static results, ``replay`` runs the tape over them."""

    def __init__(self, step: Callable[[], tuple[tuple[Tensor, Tensor], ...]]) -> None:
        recording = _Recording()
        with recording:
            self.outputs = step()
        self._tape = tuple(recording.tape)
        self.syncs = tuple(recording.syncs)

    @property
    def recorded(self) -> int:
        """Operators and launches on the tape."""
        return len(self._tape)

    def replay(self) -> None:
        for run_again in self._tape:
            run_again()


class _Recording(SyncWatch):
    """Runs a step while writing its tape."""

    def __init__(self) -> None:
        super().__init__()
        self.tape: list[Callable[[], None]] = []

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if func in _ALLOCATIONS:
            fresh = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            _spoil(fresh)
            if fresh:
                self.tape.append(lambda: _spoil(fresh))
        elif not _is_view(func):
            self.tape.append(lambda: _copy_results(result, func(*args, **kwargs)))
        return result

    def launch(self, run: Callable[[], Any], executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        grid = executor.grid
        if callable(grid):
            # The grid may close over values that change; the graph keeps the one that it was captured with.
            seen: list[tuple[int, ...]] = []

            def grid_once(meta: dict[str, Any]) -> tuple[int, ...]:
                seen.append(tuple(grid(meta)))
                return seen[-1]

            executor.grid = grid_once
            result = run()
            executor.grid = seen[-1]
        else:
            result = run()
        self.tape.append(run)
        return result


def _is_view(func: Any) -> bool:
    """Whether the operator only makes another view of its argument: its schema aliases without writing."""
    returns = func._schema.returns
    return bool(returns) and all(item.alias_info is not None and not item.alias_info.is_write for item in returns)


def _copy_results(recorded: Any, again: Any) -> None:
    for old, new in zip(tree_leaves(recorded), tree_leaves(again), strict=True):
        # In-place operators return their argument: nothing to copy.
        if isinstance(old, Tensor) and (old.data_ptr() != new.data_ptr() or not old.numel()):
            if old.shape != new.shape:
                raise RuntimeError(
                    f"recorded replay: an operator gave shape {tuple(new.shape)}, at capture {tuple(old.shape)}; "
                    "shapes inside a captured step must not depend on data"
                )
            old.copy_(new)


def _spoil(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        # e4m3 has no fill on a CPU; its NaN is all ones, as is that of every other float format.
        tensor.view(torch.uint8).fill_(0xFF) if tensor.element_size() == 1 else tensor.fill_(float("nan"))
