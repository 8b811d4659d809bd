"""Results from the content of a document: every value is checked here, so that nothing that renders them has to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dsv4_matrix.bench.results import (
    Ceilings,
    KernelResources,
    Measurement,
    Results,
    StepMeasurement,
)
from dsv4_matrix.bench.shapes import Shape
from dsv4_matrix.bench.value import Value, WrongValueError, shown

Readers = Mapping[str, Callable[[Value], Any]]

KEYS = ("schema", "finished", "machine", "ceilings", "planned", "shapes", "steps", "kernels")
CEILINGS: Readers = {"bytes_per_second": Value.positive, "flops_per_second": Value.positive}
SHAPE: Readers = {
    "ratio": Value.whole,
    "heads": Value.some,
    "batch": Value.some,
    "s_q": Value.some,
    "topk": Value.some,
    "page": Value.some,
    "extra_topk": Value.whole,
    "extra_page": Value.whole,
    "extra_lengths": Value.flag,
    "shared": Value.flag,
    "extra_slots": Value.whole,
}
MEASUREMENT: Readers = {
    "shape": lambda value: value.record(Shape, SHAPE),
    "median": Value.positive,
    "low": Value.positive,
    "high": Value.positive,
    "memory_floor": Value.positive,
    "matrix_floor": Value.positive,
    "table": Value.positive_or_null,
    "beside": Value.positive_or_null,
    "choice": Value.text,
}
STEP: Readers = {
    "name": Value.text,
    "value": Value.amount,
    "unit": Value.text,
    "at_most": Value.amount_or_null,
    "at_least": Value.amount_or_null,
}
KERNEL: Readers = {
    "name": Value.text,
    "variant": Value.text,
    "warps": Value.some,
    "registers": Value.whole,
    "local_bytes": Value.whole,
    "shared_bytes": Value.whole,
}


def results_of(document: object) -> Results:
    """The content of a document of this schema. WrongValueError for the first value that is not what belongs there.

    What follows from other values (names, ratios, goals, the summary) may be left out, and else has to follow.
    """
    found = Value("", document).keys(KEYS, ("summary",))
    groups = {name: [_measurement(one) for one in group.items()] for name, group in found["shapes"].entries().items()}
    results = Results(
        machine=_machine(found["machine"], any(groups.values())),
        ceilings=found["ceilings"].record(Ceilings, CEILINGS),
        groups=groups,
        planned=_planned(found["planned"], groups),
        steps=[_step(one) for one in found["steps"].items()],
        kernels=[one.record(KernelResources, KERNEL) for one in found["kernels"].items()],
        finished=found["finished"].flag(),
    )
    if "summary" in found:
        _check_summary(found["summary"], results)
    return results


def _machine(value: Value, shapes: bool) -> dict[str, str]:
    """What a plot's title is made of has to be there; the rest may be any names and versions."""
    entries = value.entries()
    for role in ("kernel", "gpu") if shapes else ("gpu",):
        if role not in entries:
            raise WrongValueError(f"{value.place}: expected an object with {role}, got {_names(entries)}")
    return {role: name.text() for role, name in entries.items()}


def _measurement(value: Value) -> Measurement:
    one = value.record(Measurement, MEASUREMENT, told=("name", "ratio"))
    entries = value.entries()
    for name, least, most in (("low", "low", "median"), ("high", "median", "high")):
        if getattr(one, least) > getattr(one, most):
            raise entries[name].mistake(f"low, median and high in this order, median {shown(one.median)}")
    if "name" in entries:
        entries["name"].follows(one.shape.name, "which its shape is called")
    if "ratio" in entries:
        entries["ratio"].follows(one.ratio, "the peer's time (beside, else table) over the median")
    return one


def _planned(value: Value, groups: Mapping[str, list[Measurement]]) -> dict[str, int]:
    """How many shapes were to be measured, of every group that has begun at least."""
    entries = value.entries()
    for name, group in groups.items():
        if name not in entries:
            raise WrongValueError(
                f"{value.place}: expected the number of shapes of {shown(name)} too, got {_names(entries)}"
            )
        if entries[name].whole() < len(group):
            raise entries[name].mistake(f"at least the {len(group)} shapes that were measured")
    return {name: count.whole() for name, count in entries.items()}


def _step(value: Value) -> StepMeasurement:
    step = value.record(StepMeasurement, STEP, told=("goal",))
    entries = value.entries()
    if "goal" in entries:
        entries["goal"].follows(step.goal, "which the value and its bound come to")
    return step


def _check_summary(value: Value, results: Results) -> None:
    right = results.summary
    if right is None:
        value.follows(None, "as no shape of the peer's table has a peer's time")
        return
    entries = value.keys(("geometric_mean", "worst"))
    entries["geometric_mean"].follows(right.mean, "of the ratios of the peer's table")
    entries["worst"].follows(right.worst.shape.name, "the shape of the least ratio")


def _names(entries: Mapping[str, Value]) -> str:
    return f"only {', '.join(shown(name) for name in entries)}" if entries else "none"
