"""Refuses host syncs where a captured graph could not have them: a CPU watches torch, on a GPU torch watches CUDA."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from dsv4_matrix.modes.errors import HostSyncError, caller_outside_harness

aten = torch.ops.aten

#: Operators that wait for the device because a value or a shape depends on data.
_SYNCING = frozenset(
    {
        aten._local_scalar_dense.default,
        aten.equal.default,
        aten.is_nonzero.default,
        aten.nonzero.default,
        aten.masked_select.default,
        aten.bincount.default,
        aten._unique2.default,
        aten.unique_dim.default,
        aten.unique_consecutive.default,
    }
)
#: Tensor methods that read memory without an operator, so that a dispatch mode sees nothing of them.
_READING = ("tolist", "cpu", "numpy", "__array__")
#: Those that read through one, which a dispatch mode sees.
_READING_BY_OPERATOR = ("item", "__bool__", "__int__", "__float__", "__index__")


class ReadWatch:
    """Raises HostSyncError when a tensor is read by the host while active, and remembers it should that be swallowed.

    Sees Python's own ways to a tensor's values; on a GPU torch refuses the operators that wait by itself. It stands
    without a dispatch mode there, whose first use imports torch's compiler: seconds that every run would pay for.
    """

    methods: tuple[str, ...] = _READING + _READING_BY_OPERATOR

    def __init__(self) -> None:
        self.syncs: list[str] = []
        self._watching = False
        self._restore: list[Callable[[], None]] = []

    def refuse(self, what: str) -> None:
        """Record and raise."""
        message = f"host sync: {what} at {caller_outside_harness()}; keep the value on the device"
        self.syncs.append(message)
        raise HostSyncError(message)

    def __enter__(self) -> Self:
        self._watching = True
        for name in self.methods:
            self._patch(torch.Tensor, name, self._refusing(name))
        self._patch(torch.Tensor, "to", self._to_device_only())
        return self

    def __exit__(self, *exc: Any) -> None:
        self._watching = False
        for undo in reversed(self._restore):
            undo()
        self._restore.clear()

    def _patch(self, owner: Any, name: str, replacement: Any) -> None:
        # torch.Tensor inherits most methods from a C base: what it did not define itself is deleted again.
        if name in vars(owner):
            original = vars(owner)[name]
            self._restore.append(lambda: setattr(owner, name, original))
        else:
            self._restore.append(lambda: delattr(owner, name))
        setattr(owner, name, replacement)

    def _refusing(self, name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._watching:
                self.refuse(f"Tensor.{name}()")
            return original(tensor, *args, **kwargs)

        return method

    def _to_device_only(self) -> Callable[..., Any]:
        original = torch.Tensor.to

        def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            # Inside a step every tensor is on the device already, so that naming the CPU means a copy to the host.
            if self._watching and _names_the_cpu(kwargs.get("device", args[0] if args else None)):
                self.refuse("Tensor.to('cpu')")
            return original(tensor, *args, **kwargs)

        return to


class SyncWatch(ReadWatch, TorchDispatchMode):
    """The same for every operator that would wait for a device, where there is none to object: on a CPU.

    Kernel launches of Triton's interpreter run with the watch off: they read host memory to do a device's work.
    """

    methods = _READING

    def __init__(self) -> None:
        ReadWatch.__init__(self)
        TorchDispatchMode.__init__(self)

    def launch(self, run: Callable[[], Any], executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One interpreted kernel launch; ``run`` performs it."""
        return run()

    def check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise if ``func`` waits for the device on CUDA."""
        if func in _SYNCING:
            self.refuse(f"{func}")
        if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None and len(args) < 2:
            self.refuse("repeat_interleave without output_size")
        if func is aten.index.Tensor and any(_is_mask(index) for index in args[1]):
            self.refuse("indexing by a boolean mask")
        if func is aten.index_put_.default and any(_is_mask(index) for index in args[1]) and args[2].numel() != 1:
            self.refuse("assignment through a boolean mask")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.check(func, args, kwargs)
        return self.operate(func, args, kwargs)

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator."""
        return func(*args, **kwargs)

    def __enter__(self) -> Self:
        ReadWatch.__enter__(self)
        self._patch_launches()
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        ReadWatch.__exit__(self, *exc)
        TorchDispatchMode.__exit__(self, *exc)

    def _patch_launches(self) -> None:
        try:
            from triton.runtime import interpreter
        except ImportError:  # a backend without Triton
            return
        GridExecutor = interpreter.GridExecutor  # noqa: N806  (a class)
        original = GridExecutor.__call__

        def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
            def run() -> Any:
                watching, self._watching = self._watching, False
                try:
                    with _disable_current_modes():
                        return original(executor, *args, **kwargs)
                finally:
                    self._watching = watching

            return self.launch(run, executor, args, kwargs) if self._watching else original(executor, *args, **kwargs)

        self._patch(GridExecutor, "__call__", call)


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _names_the_cpu(device: Any) -> bool:
    return (isinstance(device, torch.device) and device.type == "cpu") or (
        isinstance(device, str) and device.split(":")[0] == "cpu"
    )


@contextmanager
def no_host_sync(device: str) -> Iterator[list[str]]:
    """While active, a host sync raises: HostSyncError on a CPU, torch's own RuntimeError on a GPU.

    Yields a list that holds the syncs found, which is how one that the backend swallowed comes to light on a CPU.
    """
    if torch.device(device).type != "cuda":
        with SyncWatch() as watch:
            yield watch.syncs
        return
    before = torch.cuda.get_sync_debug_mode()
    _set_sync_debug_mode("error")
    try:
        yield []
    finally:
        _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        # torch warns each time that the mode may miss a sync; a capture would not.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)
