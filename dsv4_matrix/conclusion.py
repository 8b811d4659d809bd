"""The end of a run: what fell short in full, the matrix as a table, and evidence if the run was complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from dsv4_matrix.declaration.model import Matrix
from dsv4_matrix.report import canonical
from dsv4_matrix.report.result import Header, Outcome, Report, Result
from dsv4_matrix.report.table import matrix_table, refusals_text

#: More failures than this are named in one line each: the first ones usually share the cause of the rest.
_FULL_MESSAGES = 8


def tell(
    matrix: Matrix, results: Sequence[Result], selected: Sequence[str], messages: Mapping[str, str], out: TextIO
) -> bool:
    """Print failing cases, then the matrix without modes of which nothing was selected. True if all selected passed.

    Args:
        results: one a declared case.
        selected: ids that the run set out to prove.
        messages: one screen for each id that did not pass.
    """
    ran = [result for result in results if result.id in set(selected)]
    short = [result for result in ran if result.outcome is not Outcome.PASSED]
    for result in short[:_FULL_MESSAGES]:
        out.write(f"\n{messages.get(result.id) or f'{result.id}: {result.outcome}, {result.reason}'}\n")
    if more := short[_FULL_MESSAGES:]:
        out.write(f"\nand {len(more)} more:\n")
        out.writelines(f"  {result.outcome} {result.id}: {_first_line(result.reason)}\n" for result in more)
    cells = {result.cell for result in ran}
    modes = {cell.mode for cell in matrix.cells if cell.id in cells}
    out.write(f"\n{matrix_table(matrix, results, modes=modes)}\n\n" if modes else "\n")
    if any(result.kind == "refusal" for result in ran):
        out.write(f"{refusals_text(ran)}\n")
    proven = {result.id for result in ran}
    others = Counter(result.reason for result in results if result.id not in proven)
    rest = ", ".join(f"{count} {reason}" for reason, count in sorted(others.items()))
    out.write(f"{len(ran) - len(short)} of {len(ran)} selected cases passed{f'; {rest}' if rest else ''}\n")
    out.flush()
    return not short


def record(report: Report, selected: Sequence[str], started: Header, path: Path) -> str:
    """Write evidence to ``path`` if the run was complete and on one state of the sources; else the reason why not."""
    absent = (Outcome.LOST, Outcome.NOT_RUN)
    incomplete = [r.id for r in report.results if r.id in set(selected) and r.outcome in absent]
    if incomplete:
        return f"these cases did not run: {', '.join(incomplete)}"
    if report.header != started:
        return "the sources changed while the matrix ran"
    try:
        canonical.write(report, path)
    except canonical.ReportError as error:
        return str(error)
    return ""


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
