"""What a run of the benchmark leaves, as plain values that need no GPU and no torch to be read again."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from dsv4_matrix.bench.shapes import Shape

#: groups of measured shapes
PEER_TABLE, LONG_CONTEXT = "peer table", "long context"
#: what the ratios to the peer are meant to reach over the peer's table: their geometric mean, and each of them
MEAN_GOAL, WORST_GOAL = 1.15, 0.95


@dataclass(frozen=True)
class Ceilings:
    """Rates of one device.

    Attributes:
        bytes_per_second: device-to-device copy, bytes read plus bytes written.
        flops_per_second: bf16 matrix product on random data, two operations a multiply-add.
    """

    bytes_per_second: float
    flops_per_second: float

    def memory_microseconds(self, moved: float) -> float:
        return moved / self.bytes_per_second * 1e6

    def matrix_microseconds(self, operations: float) -> float:
        return operations / self.flops_per_second * 1e6


@dataclass(frozen=True)
class Measurement:
    """One shape, in microseconds.

    Attributes:
        median, low, high: of the replays; low and high are their second and last but one deciles.
        memory_floor, matrix_floor: from this device's own ceilings.
        table: the peer's median from its table; None where the table has no such shape or is of another GPU.
        beside: the peer's median in this process; None where it is not installed.
        choice: which of its kernels the function took, in its own words; empty where it has one only.
    """

    shape: Shape
    median: float
    low: float
    high: float
    memory_floor: float
    matrix_floor: float
    table: float | None
    beside: float | None
    choice: str = ""

    @property
    def floor(self) -> float:
        """The higher of the two floors."""
        return max(self.memory_floor, self.matrix_floor)

    @property
    def peer(self) -> float | None:
        """The peer's time: side by side if both ran here, else from the table."""
        return self.table if self.beside is None else self.beside

    @property
    def ratio(self) -> float | None:
        """The peer's time over ours; above 1 is faster than the peer."""
        return None if self.peer is None else self.peer / self.median

    @property
    def kernel(self) -> str:
        """The first word of ``choice``: the kernel without the reason."""
        return self.choice.partition(":")[0]

    @property
    def picoseconds_a_key(self) -> float:
        """Of one key of one row."""
        return self.median * 1e6 / (self.shape.rows * self.shape.keys)


@dataclass(frozen=True)
class StepMeasurement:
    """A named quantity of the step: its value, its unit, and the bound it is held against, if it has one.

    ``at_most`` and ``at_least`` are goals to be read beside the value; nothing fails by them.
    """

    name: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def goal(self) -> str:
        """The bound in words, and whether the value keeps it; empty without one."""
        if self.at_most is not None:
            return f"at most {self.at_most:g}: {'met' if self.value <= self.at_most else 'not met'}"
        if self.at_least is not None:
            return f"at least {self.at_least:g}: {'met' if self.value >= self.at_least else 'not met'}"
        return ""


@dataclass(frozen=True)
class KernelResources:
    """One compiled Triton kernel, as the driver tells it on loading.

    Attributes:
        name: module and function.
        variant: the compile-time constants that tell it from others of its name, as ``A=1 B=2``.
        warps: of a program; a warp-specialised kernel has more than it is launched with.
        registers: of a thread.
        local_bytes: of a thread: spilled registers, and arrays if it has any.
        shared_bytes: of a program.
    """

    name: str
    variant: str
    warps: int
    registers: int
    local_bytes: int
    shared_bytes: int


@dataclass
class Results:
    """All of one run, complete or not.

    Attributes:
        machine: what was measured on what: kernel, GPU, versions.
        ceilings: of this device.
        groups: measurements of each group of shapes, in order.
        planned: how many shapes each group was to have, so that a run cut short shows as one.
        steps: what surrounds attention.
        kernels: every Triton kernel that was launched meanwhile.
        finished: whether the run came to its end.
    """

    machine: dict[str, str]
    ceilings: Ceilings
    groups: dict[str, list[Measurement]] = field(default_factory=dict)
    planned: dict[str, int] = field(default_factory=dict)
    steps: list[StepMeasurement] = field(default_factory=list)
    kernels: list[KernelResources] = field(default_factory=list)
    finished: bool = False

    @property
    def summary(self) -> Summary | None:
        """Over the peer's table, whose shapes long contexts share in part."""
        return summarise(self.groups.get(PEER_TABLE, []))

    @property
    def everything(self) -> list[Measurement]:
        return [result for results in self.groups.values() for result in results]


@dataclass(frozen=True)
class Summary:
    """Geometric mean of the ratios to the peer, and the shape with the smallest."""

    mean: float
    worst: Measurement


def summarise(results: Sequence[Measurement]) -> Summary | None:
    """None where no shape has a peer's time."""
    compared = [(result.ratio, result) for result in results if result.ratio is not None]
    if not compared:
        return None
    mean = math.exp(statistics.fmean(math.log(ratio) for ratio, _ in compared))
    return Summary(mean, min(compared, key=lambda pair: pair[0])[1])


@dataclass(frozen=True)
class Ladder:
    """The same call over growing lists of keys.

    Attributes:
        name: ratio, heads, batch and rows a request, as in a shape's name.
        rungs: by number of keys, the fewest first.
    """

    name: str
    rungs: tuple[Measurement, ...]

    @property
    def growth(self) -> float:
        """Time a key of the longest over the shortest: 1 is linear, below 1 a fixed part is spread over more keys."""
        return self.rungs[-1].picoseconds_a_key / self.rungs[0].picoseconds_a_key


def ladders(results: Sequence[Measurement]) -> list[Ladder]:
    """Measurements that differ in their number of keys alone, two or more of each."""
    found: dict[str, list[Measurement]] = {}
    for result in results:
        shape = result.shape
        name = shape.name.replace(f"-k{shape.keys}-", "-")
        found.setdefault(name, []).append(result)
    return [
        Ladder(name, tuple(sorted(rungs, key=lambda rung: rung.shape.keys)))
        for name, rungs in found.items()
        if len(rungs) > 1
    ]
