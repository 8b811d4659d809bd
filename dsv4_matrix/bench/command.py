"""``dsv4-matrix bench``: measure, print and write as it goes; or render a document that an earlier run wrote."""

from __future__ import annotations

import sys
from pathlib import Path

from dsv4_matrix.bench import document, present
from dsv4_matrix.bench.markdown import markdown
from dsv4_matrix.bench.plot import svg
from dsv4_matrix.bench.request import Request, RequestError, check
from dsv4_matrix.bench.results import Results

GOOD, INCOMPLETE, BAD_INPUT = 0, 1, 2


def run_bench(request: Request) -> int:
    """Do what is asked; the exit status."""
    try:
        check(request)
        if request.source is None:
            from dsv4_matrix.bench.session import run_session

            results = run_session(request)
        else:
            results = document.read(request.source)
            for line in [markdown(results).rstrip()] if request.table else _as_printed(results):
                print(line)
        if request.plot is not None:
            _draw(results, request.plot)
    except (RequestError, document.DocumentError) as error:
        print(f"dsv4-matrix bench: {error}", file=sys.stderr)
        return BAD_INPUT
    return GOOD if results.finished or request.source is not None else INCOMPLETE


def _draw(results: Results, path: Path) -> None:
    if not results.everything:
        raise RequestError(f"{path}: a plot shows shapes, and none was measured")
    title = f"{results.machine['kernel']} on {results.machine['gpu']}"
    path.write_text(svg(results.everything, title), encoding="utf-8")


def _as_printed(results: Results) -> list[str]:
    lines = [", ".join(f"{name} {value}" for name, value in results.machine.items())]
    for name, group in results.groups.items():
        lines += [f"{name}:", present.HEADER, *(present.line(one) for one in group)]
    lines += [present.step_line(step) for step in results.steps]
    return [*lines, *present.closing(results)]
