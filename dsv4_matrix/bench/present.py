"""Results as lines for people, printed as they come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dsv4_matrix.bench.results import (
    LONG_CONTEXT,
    MEAN_GOAL,
    WORST_GOAL,
    Ceilings,
    KernelResources,
    Measurement,
    Results,
    StepMeasurement,
    ladders,
)
from dsv4_matrix.bench.text import one_line

HEADER = " ".join(
    f"{title:{spec}}"
    for title, spec in (
        ("shape", "<24"), ("us", ">8"), ("10-90 %", ">15"), ("memory", ">8"), ("matrix", ">8"), ("x floor", ">8"),
        ("peer", ">8"), ("beside", ">8"), ("ratio", ">6"), ("kernel", "<"),
    )
)  # fmt: skip


def machine_line(machine: Mapping[str, str]) -> str:
    return one_line(", ".join(f"{name} {value}" for name, value in machine.items()))


def line(result: Measurement) -> str:
    """One row of the table; ``ratio`` is the peer's time over ours, above 1 is faster than the peer."""
    spread = f"{result.low:.1f}-{result.high:.1f}"
    return one_line(
        f"{result.shape.name:<24} {result.median:8.1f} {spread:>15} {result.memory_floor:8.1f} "
        f"{result.matrix_floor:8.1f} {result.median / result.floor:8.1f} {_optional(result.table, 8, 1)} "
        f"{_optional(result.beside, 8, 1)} {_optional(result.ratio, 6, 2)} {result.kernel}".rstrip()
    )


def rates(ceilings: Ceilings) -> str:
    copy, products = ceilings.bytes_per_second / 1e12, ceilings.flops_per_second / 1e12
    return f"copy {copy:.2f} TB/s, bf16 products {products:.0f} TFLOP/s"


def comparison(results: Results) -> str:
    """What the peer's table comes to as a whole; empty without a peer's time."""
    summary = results.summary
    if summary is None:
        return ""
    return (
        f"ratio to the peer: geometric mean {summary.mean:.3f} (goal {MEAN_GOAL}), "
        f"worst {summary.worst.ratio:.3f} of {summary.worst.shape.name} (goal {WORST_GOAL})"
    )


def step_line(step: StepMeasurement) -> str:
    return one_line(f"{step.name:<52} {step.value:8.1f} {step.unit:<2} {step.goal}".rstrip())


def ladder_lines(results: Sequence[Measurement]) -> list[str]:
    """Time a key of one row over growing lists: what linear cost looks like."""
    lines = []
    for ladder in ladders(results):
        rungs = ", ".join(f"{rung.shape.keys}: {rung.picoseconds_a_key:.0f}" for rung in ladder.rungs)
        lines.append(f"{ladder.name}: ps a key and row at {rungs}; longest over shortest {ladder.growth:.2f}")
    return lines


def kernel_line(kernel: KernelResources) -> str:
    spilled = f"{kernel.local_bytes} bytes of local memory" if kernel.local_bytes else "no spills"
    return one_line(
        f"{kernel.name}: {kernel.warps} warps, {kernel.registers} registers, {spilled}, "
        f"{kernel.shared_bytes} bytes shared  {kernel.variant}".rstrip()
    )


def closing(results: Results) -> Iterator[str]:
    """What stands below the table, of a run or of a document read again."""
    yield rates(results.ceilings)
    compared = comparison(results)
    if compared:
        yield compared
    yield from ladder_lines(results.groups.get(LONG_CONTEXT, []))
    yield from choices(results)
    yield from (kernel_line(kernel) for kernel in results.kernels)
    yield from missing(results)


def choices(results: Results) -> list[str]:
    """What the function said of its choice of kernels, each once."""
    return sorted({one_line(result.choice) for result in results.everything} - {""})


def missing(results: Results) -> Iterator[str]:
    """What a run that was cut short did not come to."""
    for name, count in results.planned.items():
        have = len(results.groups.get(name, []))
        if have < count:
            yield f"cut short: {have} of {count} shapes of the {one_line(name)}"
    if not results.finished:
        yield "cut short: the run did not come to its end"


def _optional(value: float | None, width: int, digits: int) -> str:
    return f"{'':>{width}}" if value is None else f"{value:{width}.{digits}f}"
