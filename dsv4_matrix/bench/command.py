"""``dsv4-matrix bench``: measure, print and write as it goes; or render a document that an earlier run wrote."""

from __future__ import annotations

import sys
from pathlib import Path

from dsv4_matrix.bench import document, present
from dsv4_matrix.bench.markdown import markdown
from dsv4_matrix.bench.plot import svg
from dsv4_matrix.bench.request import Request, RequestError, check
from dsv4_matrix.bench.results import Results
from dsv4_matrix.bench.text import one_line

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
        drawn = _drawn(results, request.plot)  # before a document is printed, since it may be refused
        if request.source is not None:
            for line in [markdown(results).rstrip()] if request.table else _as_printed(results):
                print(line)
        if request.plot is not None:
            request.plot.write_text(drawn, encoding="utf-8")
    except (RequestError, document.DocumentError) as error:
        print(f"dsv4-matrix bench: {error}", file=sys.stderr)
        return BAD_INPUT
    return GOOD if results.finished or request.source is not None else INCOMPLETE


def _drawn(results: Results, path: Path | None) -> str:
    """The plot, empty without a path for it."""
    if path is None:
        return ""
    if not results.everything:
        raise RequestError(f"{path}: a plot shows shapes, and none was measured")
    return svg(results.everything, one_line(f"{results.machine['kernel']} on {results.machine['gpu']}"))


def _as_printed(results: Results) -> list[str]:
    lines = [present.machine_line(results.machine)]
    for name, group in results.groups.items():
        lines += [f"{one_line(name)}:", present.HEADER, *(present.line(one) for one in group)]
    lines += [present.step_line(step) for step in results.steps]
    return [*lines, *present.closing(results)]
