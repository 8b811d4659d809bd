"""Results as a JSON document and back: written after each shape, so that a time limit loses nothing measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dsv4_matrix.bench.results import (
    Ceilings,
    KernelResources,
    Measurement,
    Results,
    StepMeasurement,
)
from dsv4_matrix.bench.shapes import Shape
from dsv4_matrix.report.canonical import ReportError, write_in_one_step

SCHEMA = 1
_EXPECTED = f"expected a document of 'dsv4-matrix bench --json' of schema {SCHEMA}"


class DocumentError(ValueError):
    """A file that is no document of this benchmark, or that none can be written to."""


def to_json(results: Results) -> str:
    """Everything measured. Names, ratios and the summary are there for readers; ``from_json`` forms them anew."""
    shapes = {
        name: [{"name": one.shape.name, **asdict(one), "ratio": one.ratio} for one in group]
        for name, group in results.groups.items()
    }
    summary = results.summary
    found = None if summary is None else {"geometric_mean": summary.mean, "worst": summary.worst.shape.name}
    document = {
        "schema": SCHEMA,
        "finished": results.finished,
        "machine": results.machine,
        "ceilings": asdict(results.ceilings),
        "summary": found,
        "planned": results.planned,
        "shapes": shapes,
        "steps": [{**asdict(step), "goal": step.goal} for step in results.steps],
        "kernels": [asdict(kernel) for kernel in results.kernels],
    }
    return json.dumps(document, indent=2) + "\n"


def write(results: Results, path: Path) -> None:
    """Replace ``path`` as a whole: whoever reads it meanwhile sees no half document. DocumentError if it cannot be."""
    try:
        write_in_one_step(to_json(results).encode(), path)
    except ReportError as error:
        raise DocumentError(str(error)) from None


def read(path: Path) -> Results:
    """Raises DocumentError, naming the file and what is wrong with it."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DocumentError(f"{path}: cannot read the document: {error.strerror}") from error
    except ValueError as error:  # bytes that are not UTF-8, text that is not JSON
        raise DocumentError(f"{path}: {_EXPECTED}; this is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise DocumentError(f"{path}: {_EXPECTED}")
    try:
        return _results(document)
    except (KeyError, TypeError, AttributeError) as error:
        raise DocumentError(
            f"{path}: not a whole document of schema {SCHEMA}: {type(error).__name__}: {error}"
        ) from error


def _results(document: Mapping[str, Any]) -> Results:
    return Results(
        machine=document["machine"],
        ceilings=Ceilings(**document["ceilings"]),
        groups={name: [_measurement(one) for one in group] for name, group in document["shapes"].items()},
        planned=document["planned"],
        steps=[StepMeasurement(**_without(step, "goal")) for step in document["steps"]],
        kernels=[KernelResources(**kernel) for kernel in document["kernels"]],
        finished=document["finished"],
    )


def _measurement(one: Mapping[str, Any]) -> Measurement:
    values = _without(one, "name", "ratio")
    return Measurement(**{**values, "shape": Shape(**values["shape"])})


def _without(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}
