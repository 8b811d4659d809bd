"""Results as the matrix: what each cell proved, in a text that fits a table's cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from tabulate import tabulate

from dsv4_matrix.declaration.model import Cell, Matrix, State
from dsv4_matrix.report.result import Outcome, Result


def cell_text(cell: Cell, results: Sequence[Result], graphs: bool = False) -> str:
    """What ``results``, those of ``cell``, say about it.

    Covered: passed/declared cases, the worst margin, and what fell short or was not run: ``12/14 0.61, 2 not run``.
    With ``graphs`` also captures and replays. Any other state: its name, and whether its refusal was not seen.
    ``results`` holds a line for every declared case, as a finished run and a report do.
    """
    if cell.state is not State.COVERED:
        outcomes = {result.outcome for result in results} or {Outcome.NOT_RUN}
        if outcomes == {Outcome.PASSED}:
            return cell.state.value
        return f"{cell.state.value}, probe {', '.join(sorted(words(outcome) for outcome in outcomes))}"
    cases = [result for result in results if result.kind == "case"]
    if not cases:
        return "not recorded"
    counts = Counter(result.outcome for result in cases)
    if counts[Outcome.NOT_RUN] == len(cases):
        return f"{len(cases)} not run"
    text = f"{counts[Outcome.PASSED]}/{len(cases)} {worst_margin(cases)}".strip()
    others = [
        f"{count} {words(outcome)}"
        for outcome in Outcome
        if outcome is not Outcome.PASSED and (count := counts[outcome])
    ]
    if graphs and (captures := sum(result.captures for result in cases)):
        others.append(f"{captures} captured, {sum(result.replays for result in cases)} replayed")
    return ", ".join([text, *others])


def words(outcome: Outcome) -> str:
    """``not run``."""
    return outcome.value.replace("-", " ")


def worst_margin(results: Iterable[Result]) -> str:
    """The largest error over budget, as the report writes it; NaN is worse than all; empty if none was measured."""
    margins = [result.margin for result in results if result.margin]
    return max(margins, key=lambda text: (text == "nan", 0.0 if text == "nan" else float(text)), default="")


def matrix_table(
    matrix: Matrix,
    results: Iterable[Result],
    style: str = "simple",
    graphs: bool = False,
    modes: Collection[str] | None = None,
) -> str:
    """Modes down, ratios across, ``cell_text`` inside; ``style`` is a table format of tabulate.

    ``modes`` names those shown, None all: a run of a few cases need not be looked for among rows of *not run*.
    """
    of_cell: dict[str, list[Result]] = {}
    for result in results:
        of_cell.setdefault(result.cell, []).append(result)
    cells = {(cell.ratio, cell.mode): cell for cell in matrix.cells}
    rows = [
        [mode.title]
        + [
            cell_text(cell, of_cell.get(cell.id, []), graphs) if (cell := cells.get((ratio, mode.name))) else ""
            for ratio in matrix.ratios
        ]
        for mode in matrix.modes
        if modes is None or mode.name in modes
    ]
    heads = ["mode", *(f"ratio {ratio}" for ratio in matrix.ratios)]
    return tabulate(rows, headers=heads, tablefmt=style, disable_numparse=True)


def refusals_text(results: Iterable[Result]) -> str:
    """``25/25 refusals outside the cells hold``; names those that do not, and counts those that did not run."""
    refusals = [result for result in results if result.kind == "refusal"]
    ran = [result for result in refusals if result.outcome is not Outcome.NOT_RUN]
    short = [result.id for result in ran if result.outcome is not Outcome.PASSED]
    if not ran:
        return f"no refusal outside the cells was run, of {len(refusals)}"
    text = f"{len(ran) - len(short)}/{len(ran)} refusals outside the cells hold"
    text = f"{text}; not: {', '.join(short)}" if short else text
    return f"{text}; {len(refusals) - len(ran)} not run" if len(ran) < len(refusals) else text
