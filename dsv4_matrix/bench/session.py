"""A run of the benchmark on this GPU: prepare, measure part by part, and leave each result behind as it comes."""

from __future__ import annotations

import platform
import sys
import time
from dataclasses import dataclass

import torch

from dsv4_matrix.bench import document, present
from dsv4_matrix.bench.floors import measure_ceilings
from dsv4_matrix.bench.kernels import Kernel, find_kernel, find_peer
from dsv4_matrix.bench.launches import LaunchError
from dsv4_matrix.bench.measure import measure
from dsv4_matrix.bench.request import Request, RequestError
from dsv4_matrix.bench.resources import kernel_resources
from dsv4_matrix.bench.results import LONG_CONTEXT, PEER_TABLE, Measurement, Results
from dsv4_matrix.bench.shapes import NoSuchShapeError, PeerTable, Shape, long_shapes, peer_table, select
from dsv4_matrix.bench.steps import measure_steps
from dsv4_matrix.loading import Backend, LoadError, load_backend


@dataclass(frozen=True)
class Plan:
    """What is measured: groups of shapes by name, by which kernel and beside which; steps of which backend.

    ``kernel`` is None where no shapes are measured, ``backend`` where no steps are.
    """

    groups: dict[str, list[Shape]]
    kernel: Kernel | None
    peer: Kernel | None
    backend: Backend | None
    table: PeerTable


def run_session(request: Request) -> Results:
    """Measure what is asked. RequestError before anything is measured."""
    started = time.monotonic()
    plan = _plan(request)
    device = torch.device("cuda", torch.cuda.current_device())
    machine = _machine(device, plan)
    print(present.machine_line(machine), flush=True)
    results = Results(machine, measure_ceilings(device))
    results.planned = {name: len(shapes) for name, shapes in plan.groups.items()}
    Run(plan, results, request, device).all()
    for line in present.closing(results):
        print(line)
    print(f"{len(results.everything)} shapes and {len(results.steps)} steps in {time.monotonic() - started:.1f} s")
    return results


@dataclass(frozen=True)
class Run:
    """The measuring itself, over the results that it fills."""

    plan: Plan
    results: Results
    request: Request
    device: torch.device

    def all(self) -> None:
        if self.plan.kernel is not None:
            for name, shapes in self.plan.groups.items():
                self._shapes(self.plan.kernel, name, shapes)
        try:
            if self.plan.backend is not None:
                for step in measure_steps(self.plan.backend.factory, self.device):
                    self.results.steps.append(step)
                    self._leave(present.step_line(step))
            self.results.finished = True
        except LaunchError as error:
            print(f"dsv4-matrix bench: {error}", file=sys.stderr)
        self._leave()

    def _shapes(self, kernel: Kernel, name: str, shapes: list[Shape]) -> None:
        plan, results = self.plan, self.results
        table = plan.table
        comparable = results.machine["gpu"] == table.gpu
        if not comparable and plan.peer is None:
            print(f"the peer's table is of an {table.gpu}: its times are not compared with this GPU's")
        group = results.groups[name] = []
        print(f"{name}:\n{present.HEADER}")

        def tell(result: Measurement) -> None:
            group.append(result)
            self._leave(present.line(result))

        times = table.microseconds if comparable else {}
        measure(shapes, kernel, plan.peer, times, results.ceilings, self.device, tell)

    def _leave(self, line: str | None = None) -> None:
        if line is not None:
            print(line, flush=True)
        self.results.kernels = kernel_resources()
        if self.request.json is not None:
            document.write(self.results, self.request.json)


def _plan(request: Request) -> Plan:
    """Raises RequestError for what cannot be loaded, selected or run here."""
    if not torch.cuda.is_available():
        raise RequestError(
            "there is no GPU here: torch.cuda.is_available() is False; measure with --json PATH where there is one, "
            "and render that anywhere with --from PATH"
        )
    table = peer_table()
    groups: dict[str, list[Shape]] = {}
    try:
        if request.shapes or not (request.long or request.steps):
            groups[PEER_TABLE] = select(list(table.microseconds), request.shapes)
        if request.long:
            groups[LONG_CONTEXT] = long_shapes()
        kernel = find_kernel(request.kernel) if groups else None
        backend = load_backend(request.backend) if request.steps else None
        return Plan(groups, kernel, find_peer() if groups else None, backend, table)
    except (LoadError, NoSuchShapeError) as error:
        raise RequestError(str(error)) from error


def _machine(device: torch.device, plan: Plan) -> dict[str, str]:
    import triton

    under_test = {"kernel": plan.kernel, "beside": plan.peer, "backend": plan.backend}
    return {
        **{role: found.name for role, found in under_test.items() if found is not None},
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
