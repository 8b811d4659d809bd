"""Drives a case: dispatch by the matrix column, and the trace of what happened."""

from __future__ import annotations

from dsv4_matrix.cases.batch import DRAFT_RUNNER, GRAPH_MODES
from dsv4_matrix.cases.scenario import Scenario
from dsv4_matrix.declaration.model import Case
from dsv4_matrix.modes.beyond_lengths import BeyondLengths
from dsv4_matrix.modes.draft_runner import drive_draft_runner
from dsv4_matrix.modes.eager import drive_eager
from dsv4_matrix.modes.graph import drive_graph
from dsv4_matrix.modes.trace import Notebook, Trace
from dsv4_matrix.protocol import BackendFactory

_EAGER_MODES = frozenset({"eager", "verify-eager", "de-eager"})
#: Replays that every graph case has at least: two of its first batch and one between them.
_LEAST_REPLAYS = 3

__all__ = ["Trace", "drive"]


def drive(
    case: Case, scenario: Scenario, factory: BackendFactory, device: str, *, lists_as_they_are: bool = False
) -> Trace:
    """Run ``scenario`` through a backend made by ``factory`` on ``device``.

    Past their lengths its lists hold keys, see ``beyond_lengths``; with ``lists_as_they_are`` what its metadata leaves.

    Raises:
        BackendError: the backend raised; the message holds the place and the backend's innermost frames.
        ValueError: the case is a probe, or its column has no driver.
    """
    if case.cell is None or case.variant is None:
        raise ValueError(f"{case.id}: a {case.kind} is not driven; see dsv4_matrix.modes.probes")
    if scenario.runner.device != device:
        raise ValueError(f"{case.id}: scenario built for {scenario.runner.device!r}, driven on {device!r}")
    factory = factory if lists_as_they_are else BeyondLengths(factory)
    notebook, variant, mode = Notebook(), case.variant, case.cell.mode
    if mode in _EAGER_MODES:
        drive_eager(scenario, factory, notebook, gpu_only_lens=variant.gpu_only_lens)
    elif mode == DRAFT_RUNNER:
        drive_draft_runner(scenario, factory, notebook, variant)
    elif mode in GRAPH_MODES:
        drive_graph(scenario, factory, notebook, variant)
    else:
        raise ValueError(f"{case.id}: column {mode!r} has no driver; a covered cell must be in a column that has one")
    if mode in GRAPH_MODES and not notebook.violations:
        if notebook.captures != 1:
            notebook.violated(f"a graph case captures one graph, this one captured {notebook.captures}")
        if notebook.replays < _LEAST_REPLAYS:
            notebook.violated(f"a graph case replays at least {_LEAST_REPLAYS} times, this one {notebook.replays}")
    return notebook.trace
