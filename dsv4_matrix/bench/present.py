"""Results as a table for people, as JSON for programs, and as a plot of times against floors."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dsv4_matrix.bench.floors import Ceilings
from dsv4_matrix.bench.measure import Measurement, summarise
from dsv4_matrix.bench.steps import StepMeasurement


class PlotError(RuntimeError):
    """A plot that cannot be made here."""


HEADER = " ".join(
    f"{title:{spec}}"
    for title, spec in (
        ("shape", "<24"), ("us", ">8"), ("10-90 %", ">15"), ("memory", ">8"), ("matrix", ">8"), ("x floor", ">8"),
        ("peer", ">8"), ("beside", ">8"), ("ratio", ">6"),
    )
)  # fmt: skip


def line(result: Measurement) -> str:
    """One row of the table; ``ratio`` is the peer's time over ours, above 1 is faster than the peer."""
    floor = max(result.memory_floor, result.matrix_floor)
    spread = f"{result.low:.1f}-{result.high:.1f}"
    return (
        f"{result.shape.name:<24} {result.median:8.1f} {spread:>15} {result.memory_floor:8.1f} "
        f"{result.matrix_floor:8.1f} {result.median / floor:8.1f} {_optional(result.table, 8, 1)} "
        f"{_optional(result.beside, 8, 1)} {_optional(result.ratio, 6, 2)}"
    )


def closing(results: Sequence[Measurement], ceilings: Ceilings) -> str:
    """What the shapes come to together."""
    copy, products = ceilings.bytes_per_second / 1e12, ceilings.flops_per_second / 1e12
    text = f"copy {copy:.2f} TB/s, bf16 products {products:.0f} TFLOP/s"
    summary = summarise(results)
    if summary is None:
        return text + "; no peer times for these shapes on this GPU"
    ratio = summary.worst.ratio
    return (
        f"{text}\nratio to the peer: geometric mean {summary.mean:.3f}, worst {ratio:.3f} ({summary.worst.shape.name})"
    )


def step_lines(steps: Sequence[StepMeasurement]) -> list[str]:
    return [f"{step.name:<48} {step.value:8.1f} {step.unit:<3} {step.goal}".rstrip() for step in steps]


def as_json(
    machine: Mapping[str, Any], ceilings: Ceilings, groups: Mapping[str, Sequence[Measurement]],
    steps: Sequence[StepMeasurement],
) -> str:  # fmt: skip
    """Everything measured, with the machine it was measured on."""
    measured: dict[str, Any] = {
        name: [{**asdict(result), "name": result.shape.name, "ratio": result.ratio} for result in results]
        for name, results in groups.items()
    }
    summary = summarise([result for results in groups.values() for result in results])
    found = None if summary is None else {"geometric_mean": summary.mean, "worst": summary.worst.shape.name}
    document = {
        "machine": dict(machine),
        "ceilings": asdict(ceilings),
        "summary": found,
        "shapes": measured,
        "steps": [asdict(step) for step in steps],
    }
    return json.dumps(document, indent=2) + "\n"


def check_plot() -> None:
    """PlotError if a plot could not be drawn: said before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError("--plot needs matplotlib, which is not installed: pip install 'dsv4-matrix[bench]'")


def plot(results: Sequence[Measurement], path: Path, title: str) -> None:
    """Time of each shape against its two floors and the peer, logarithmic; the format follows the file's name."""
    check_plot()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.26 * len(results) + 1.6), layout="constrained")
    axes = figure.add_subplot()
    rows = range(len(results))
    axes.hlines(rows, [max(r.memory_floor, r.matrix_floor) for r in results], [r.median for r in results], color="0.85")
    axes.plot([r.memory_floor for r in results], rows, "|", color="tab:blue", label="memory floor", markersize=9)
    axes.plot([r.matrix_floor for r in results], rows, "|", color="tab:orange", label="matrix floor", markersize=9)
    peers = [(r.table if r.beside is None else r.beside, row) for row, r in zip(rows, results, strict=True)]
    known = [(time, row) for time, row in peers if time is not None]
    if known:
        axes.plot([time for time, _ in known], [row for _, row in known], "x", color="tab:red", label="peer")
    axes.plot([r.median for r in results], rows, "o", color="tab:green", label="this kernel", markersize=5)
    axes.set_yticks(list(rows), [r.shape.name for r in results], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("microseconds")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path)


def _optional(value: float | None, width: int, digits: int) -> str:
    return f"{'':>{width}}" if value is None else f"{value:{width}.{digits}f}"
