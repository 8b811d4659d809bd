"""``dsv4-matrix bench``: measure, print as it goes, and leave JSON and a plot where asked."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

import torch

from dsv4_matrix.bench import present
from dsv4_matrix.bench.floors import measure_ceilings
from dsv4_matrix.bench.kernels import find_kernel, find_peer
from dsv4_matrix.bench.measure import Measurement, measure
from dsv4_matrix.bench.shapes import NoSuchShapeError, long_shapes, peer_table, select
from dsv4_matrix.bench.steps import StepMeasurement, measure_steps
from dsv4_matrix.loading import LoadError, load_backend

GOOD, BAD_INPUT = 0, 2


def run_bench(
    *,
    kernel: str | None,
    backend: str | None,
    shapes: str | None,
    long: bool,
    steps: bool,
    json_path: str | None,
    plot_path: str | None,
) -> int:
    """Run the benchmark on the current GPU; the exit status. Arguments are those of the command."""
    try:
        if plot_path:
            present.check_plot()
        if not torch.cuda.is_available():
            raise LoadError("there is no GPU here: torch.cuda.is_available() is False")
        table = peer_table()
        chosen = select(list(table.microseconds), shapes)
        under_test, peer = find_kernel(kernel), find_peer()
        factory = load_backend(backend).factory if steps else None
    except (LoadError, NoSuchShapeError, present.PlotError) as error:
        print(f"dsv4-matrix bench: {error}", file=sys.stderr)
        return BAD_INPUT
    device = torch.device("cuda", torch.cuda.current_device())
    machine = _machine(device, under_test.name)
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    comparable = machine["gpu"] == table.gpu
    if not comparable and peer is None:
        print(f"the peer's table is of an {table.gpu}: its times are not compared with this GPU's")
    times = table.microseconds if comparable else {}
    ceilings = measure_ceilings(device)
    print(present.HEADER)

    def tell(result: Measurement) -> None:
        print(present.line(result), flush=True)

    groups = {"peer table": measure(chosen, under_test, peer, times, ceilings, device, tell)}
    if long:
        groups["long context"] = measure(long_shapes(), under_test, peer, times, ceilings, device, tell)
    for choice in sorted({result.choice for results in groups.values() for result in results if result.choice}):
        print(choice)
    print(present.closing(groups["peer table"], ceilings))
    measured: list[StepMeasurement] = []
    if factory is not None:
        measured = measure_steps(factory, ceilings, device)
        print("\n".join(present.step_lines(measured)))
    if json_path:
        Path(json_path).write_text(present.as_json(machine, ceilings, groups, measured), encoding="utf-8")
    if plot_path:
        everything = [result for results in groups.values() for result in results]
        present.plot(everything, Path(plot_path), f"{under_test.name} on {machine['gpu']}")
    return GOOD


def _machine(device: torch.device, kernel: str) -> dict[str, Any]:
    import triton

    return {
        "kernel": kernel,
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
