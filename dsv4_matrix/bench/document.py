"""Results as a JSON document and back: written after each shape, so that a time limit loses nothing measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from dsv4_matrix.bench.content import results_of
from dsv4_matrix.bench.results import Results
from dsv4_matrix.bench.value import WrongValueError, shown
from dsv4_matrix.report.canonical import ReportError, write_in_one_step

SCHEMA = 1
_EXPECTED = f"expected a document of 'dsv4-matrix bench --json' of schema {SCHEMA}"


class DocumentError(ValueError):
    """A file that is no document of this benchmark, or that none can be written to."""


def to_json(results: Results) -> str:
    """Everything measured. Names, ratios and the summary are there for readers; ``read`` forms them anew, and refuses
    a document in which they do not follow from the rest.
    """
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
    """Raises DocumentError, naming the file, the place in it, what was expected there and what is there."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DocumentError(f"{path}: cannot read the document: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # bytes that are not UTF-8, text that is not JSON or nested too deep
        raise DocumentError(f"{path}: {_EXPECTED}; this is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise DocumentError(f"{path}: {_EXPECTED}, got {shown(document)}")
    schema = document.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        raise DocumentError(f"{path}: {_EXPECTED}, got schema {shown(schema)}")
    try:
        return results_of(document)
    except WrongValueError as error:
        raise DocumentError(f"{path}: {error}") from None
