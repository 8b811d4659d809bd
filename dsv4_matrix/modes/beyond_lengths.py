"""Backends that hand key lists to a kernel do so with live keys past the lengths, while a case runs.

Only the backend knows its lists, so it is asked; one that has none is driven as it is.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from dsv4_matrix.protocol import AttentionBackend, BackendFactory, MultiStepDraftBackend, RunnerConfig


@runtime_checkable
class PutsKeysBeyondLengths(Protocol):
    """Optional, on a backend: list lengths are put to the test, and not only what metadata leaves behind them."""

    def put_keys_beyond_lengths(self) -> None:
        """Called once, right after the backend was built.

        From then on each list that the backend gives its kernel holds, in columns past the list's length, slots of
        keys whose weight would change the answer, for example keys of the row once more. The answer must not change by
        a bit.
        """
        ...


class BeyondLengths:
    """``factory``, whose backends are told so as they are built."""

    def __init__(self, factory: BackendFactory) -> None:
        self._factory = factory

    def __call__(self, runner: RunnerConfig) -> AttentionBackend:
        backend = self._factory(runner)
        _tell(backend)
        return backend

    def multi_step(self, runner: RunnerConfig, *, num_steps: int, compress_ratio: int = 0) -> MultiStepDraftBackend:
        multi = self._factory.multi_step(runner, num_steps=num_steps, compress_ratio=compress_ratio)
        for backend in getattr(multi, "attn_backends", ()):
            _tell(backend)
        return multi


def _tell(backend: Any) -> None:
    if isinstance(backend, PutsKeysBeyondLengths):
        backend.put_keys_beyond_lengths()
