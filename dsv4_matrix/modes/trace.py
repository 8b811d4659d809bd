"""What driving a case yields: the answers, how many graphs were captured and replayed, and what was violated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv4_matrix.cases.scenario import Observation
from dsv4_matrix.import_fault import ENDINGS
from dsv4_matrix.modes.errors import BackendError, HostSyncError
from dsv4_matrix.modes.host_sync import no_host_sync
from dsv4_matrix.modes.watch import same_bits


@dataclass(frozen=True)
class Trace:
    """One driven case.

    Attributes:
        observations: what the judge compares, live rows only; no rows for an idle step.
        captures: graphs captured.
        replays: graph replays, idle ones included.
        violations: plain sentences; any of them fails the case, whatever the numbers say.
    """

    observations: tuple[Observation, ...]
    captures: int
    replays: int
    violations: tuple[str, ...]


@dataclass
class Notebook:
    """Collects a trace while a mode drives a case."""

    observations: list[Observation] = field(default_factory=list)
    captures: int = 0
    replays: int = 0
    violations: list[str] = field(default_factory=list)

    def violated(self, sentence: str) -> None:
        self.violations.append(sentence)

    @property
    def trace(self) -> Trace:
        return Trace(tuple(self.observations), self.captures, self.replays, tuple(self.violations))

    @contextmanager
    def backend_at_work(self, place: str, *, no_sync_on: str = "") -> Iterator[None]:
        """The backend's own code runs inside: a host sync becomes a violation, any other of its endings a BackendError.

        With ``no_sync_on`` a device, host syncs are refused; without, only a captured step refuses them.
        """
        try:
            if not no_sync_on:
                yield
                return
            with no_host_sync(no_sync_on) as syncs:
                yield
            for sync in syncs:
                self.violated(f"{place}: {sync} (the backend caught the error)")
        except LegEnded:
            raise
        except HostSyncError as error:
            self.violated(f"{place}: {error}")
            raise LegEnded from error
        except ENDINGS as error:
            if (refused := _cuda_sync(error)) is not None:
                self.violated(f"{place}: host sync: {refused}")
                raise LegEnded from error
            raise BackendError(place, error) from error

    def check_answer(self, place: str, answer: object, rows: int, heads: int, head_dim: int) -> bool:
        """Whether ``answer`` is ``(out, lse)`` of the promised shapes and dtypes; says so if not.

        A fault is said where it is found first: as a rule every later step has it too, and fills the screen with it.
        """
        faults = answer_faults(answer, rows, heads, head_dim)
        for fault in faults:
            if not any(sentence.endswith(f": {fault}") for sentence in self.violations):
                self.violated(f"{place}: {fault}")
        return not faults

    def take(self, place: str, answer: object, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """A copy of ``answer`` if it is what ``check_answer`` demands for the query ``like``, else None.

        A copy, because a backend may answer from a workspace that its next step reuses.
        """
        rows, heads, head_dim = like.shape
        if not self.check_answer(place, answer, rows, heads, head_dim):
            return None
        assert isinstance(answer, tuple)
        return answer[0].clone(), answer[1].clone()

    def check_bits(self, place: str, other: str, got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
        """Rows of ``got`` and ``want`` must agree bit for bit; names the first row that does not."""
        for name, one, two in zip(("out", "lse"), got, want, strict=True):
            if one.shape != two.shape or one.dtype != two.dtype:
                self.violated(f"{place}: {name} is {describe(one)}, {other} {describe(two)}")
                continue
            different = (~same_bits(one, two)).nonzero().flatten().tolist()
            if different:
                self.violated(
                    f"{place}: {name} differs in bits from {other} in {len(different)} of {one.shape[0]} live rows, "
                    f"first row {different[0]}"
                )

    def observe(self, leg: str, number: int, answer: tuple[Tensor, Tensor], *, graph: bool = False) -> None:
        """Keep the answer for the judge; a step without rows has an empty one."""
        self.observations.append(Observation(leg, number, answer[0], answer[1], graph))


class LegEnded(Exception):  # noqa: N818  (control flow, not an error)
    """A violation after which the rest of this leg would mean nothing; the notebook holds the sentence."""


def _cuda_sync(error: BaseException | None) -> BaseException | None:
    """The first error of a chain in which CUDA refused a sync: torch's debug mode outside a capture, the driver inside.

    What a broken capture raises when it is ended hides the cause, which is its context.
    """
    if error is None:
        return None
    words = ("called a synchronizing CUDA operation", "stream is capturing", "previous error during capture")
    return _cuda_sync(error.__context__) or (error if any(word in str(error) for word in words) else None)


def answer_faults(answer: object, rows: int, heads: int, head_dim: int) -> list[str]:
    """What is wrong with what ``forward`` returned, sentences; none if it is ``(out, lse)`` as the protocol has it."""
    wanted = (("out", [rows, heads, head_dim], torch.bfloat16), ("lse", [rows, heads], torch.float32))
    if not (isinstance(answer, tuple) and len(answer) == 2 and all(isinstance(part, Tensor) for part in answer)):
        owed = ", ".join(f"{name} {dtype} {shape}" for name, shape, dtype in wanted)
        return [f"forward must return (out, lse), a tuple of {owed}; got {describe(answer)}"]
    return [
        f"{name} must be {dtype} {shape}, got {describe(got)}"
        for (name, shape, dtype), got in zip(wanted, answer, strict=True)
        if list(got.shape) != shape or got.dtype != dtype
    ]


def describe(value: object) -> str:
    """``torch.bfloat16 [2, 16, 512]`` of a tensor, the parts of a tuple, the type of anything else."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(describe(part) for part in value)})"
    return type(value).__name__
