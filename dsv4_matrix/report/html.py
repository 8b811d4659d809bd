"""Reports as one self-contained page: the matrix as a heat map of margins, and every case with its message.

No network, no font, no library: a file that opens from a CI artefact. The policy in its head allows only the one style
and the one script that stand in it, by hash, so that nothing in a message could run even if it were not escaped.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from string import Template

from dsv4_matrix.declaration.model import Cell, Matrix, State
from dsv4_matrix.report.gaps import Gaps
from dsv4_matrix.report.ledger import fell_short
from dsv4_matrix.report.result import Outcome, Report, Result
from dsv4_matrix.report.table import worst_margin

_HERE = Path(__file__).parent
_REFUSALS = "refusals"


@dataclass(frozen=True)
class Told:
    """A report, what it lacks, and the messages of its cases by id."""

    report: Report
    gaps: Gaps
    messages: Mapping[str, str] = field(default_factory=dict)


def page(matrix: Matrix, told: Sequence[Told]) -> str:
    """The page for one report a device. The same for the same reports; no time and no host is in it.

    ValueError if ``told`` is empty or two reports are of one device and backend: the page could not tell them apart.
    """
    names = [_device(one) for one in told]
    if not told or len(set(names)) != len(names):
        raise ValueError(f"a page needs reports, each of another device or backend; got {', '.join(names) or 'none'}")
    style, script = _asset("page.css"), _asset("page.js")
    rows = [_row(matrix, one, index, result) for index, one in enumerate(told) for result in _ordered(one)]
    outcomes = [outcome.value for outcome in Outcome]
    modes = [(mode.name, mode.title) for mode in matrix.modes] + [(_REFUSALS, "Refusals outside the cells")]
    return Template(_asset("page.html")).substitute(
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        title=escape(f"DeepSeek-V4 attention matrix: {', '.join(names)}"),
        verdicts="\n".join(_verdict(one) for one in told),
        sections="\n".join(_section(matrix, one, index) for index, one in enumerate(told)),
        outcome_options=_options((name, name) for name in outcomes),
        ratio_options=_options((str(ratio), str(ratio)) for ratio in matrix.ratios),
        mode_options=_options(modes),
        device_options=_options((name, name) for name in names),
        count=f"{len(rows)} cases",
        cases="\n".join(rows),
    )


def _verdict(told: Told) -> str:
    short, missing = fell_short(told.report.results), told.gaps.missing
    passed = sum(result.outcome is Outcome.PASSED for result in told.report.results)
    total = passed + len(short) + len(missing)
    good = passed == total and total > 0 and not told.gaps.undeclared
    mark, style = ("✓", "good") if good else ("✗", "bad")
    text = f"{passed} of {total} cases passed on {_device(told)}"
    lines = [f'<p class="verdict {style}"><span aria-hidden="true">{mark}</span> {escape(text)}</p>']
    for gap in told.gaps.told():
        names = escape(", ".join(gap.names))
        lines += [f'<p class="verdict bad">{escape(gap.head)}:</p>', f'<p class="facts">{names}</p>']
    return "\n".join(lines)


def _section(matrix: Matrix, told: Told, index: int) -> str:
    header, by_cell = told.report.header, _by_cell(told.report.results)
    cells = {(cell.ratio, cell.mode): cell for cell in matrix.cells}
    heads = "".join(f'<th scope="col">ratio {ratio}</th>' for ratio in matrix.ratios)
    rows = "\n".join(
        f'<tr><th scope="row" title="{escape(mode.summary)}">{escape(mode.title)}</th>'
        + "".join(
            _cell(told, index, cell, by_cell.get(cell.id, []))
            for ratio in matrix.ratios
            if (cell := cells[ratio, mode.name])
        )
        + "</tr>"
        for mode in matrix.modes
    )
    facts = (
        f"backend {header.backend}, torch {header.torch}, triton {header.triton or 'none'}, "
        f"matrix.yaml {header.matrix_sha256[:12]}, sources {header.fingerprint[:12]}"
        + (f", kernels: {header.kernels}" if header.kernels else "")
    )
    return (
        f'<section aria-labelledby="m{index}">\n<h2 id="m{index}">{escape(_device(told))}</h2>\n'
        f'<p class="facts">{escape(facts)}</p>\n<table>\n'
        "<caption>Largest error over its budget in each cell, and cases passed of those declared. Choose a cell to see "
        f'its cases.</caption>\n<thead><tr><th scope="col">mode</th>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n'
        f"</table>\n{_LEGEND}\n</section>"
    )


_LEGEND = (
    '<ul class="legend"><li><span class="h0"></span> far inside its budget</li>'
    '<li><span class="h9"></span> just inside</li><li><span class="short"></span> ✗ fell short</li>'
    '<li><span class="state"></span> not covered, its refusal is probed</li>'
    '<li><span class="idle"></span> nothing measured</li></ul>'
)


def _cell(told: Told, index: int, cell: Cell, results: Sequence[Result]) -> str:
    style, big, small = _cell_text(cell, results)
    first = min(results, key=_severity) if results else None
    target = f"#{_anchor(index, first.id)}" if first is not None else "#cases"
    return (
        f'<td><a class="{style}" href="{target}" data-ratio="{cell.ratio}" data-mode="{escape(cell.mode)}" '
        f'data-device="{escape(_device(told))}"><b>{escape(big)}</b><small>{escape(small)}</small></a></td>'
    )


def _cell_text(cell: Cell, results: Sequence[Result]) -> tuple[str, str, str]:
    """Class, large and small text of a cell. Colour never stands alone: what it says is in the text too."""
    short = fell_short(results)
    passed = sum(result.outcome is Outcome.PASSED for result in results)
    margin = worst_margin(results)
    if cell.state is not State.COVERED:
        if short:
            return "short", "✗", f"{cell.state.value}, refusal {short[0].outcome.value}"
        return "state", "–", cell.state.value + ("" if passed else ", not probed")
    absent = sum(result.outcome is Outcome.NOT_RUN for result in results)
    counts = f"{passed}/{len(cell.variants)} passed" + (f", {absent} not run" if absent else "")
    if short:
        return "short", f"✗ {margin}".strip(), f"{counts}, {len(short)} short"
    if not margin:
        return "idle", "–", counts
    part = float(margin)
    return f"h{int(part * 10) if part < 1 else 9}", margin, counts


def _row(matrix: Matrix, told: Told, index: int, result: Result) -> str:
    ratio, mode, declared = "", _REFUSALS, ""
    if result.cell:
        cell = next((cell for cell in matrix.cells if cell.id == result.cell), None)
        ratio, mode = (str(cell.ratio), cell.mode) if cell is not None else ("", "")
        declared = cell.reason if cell is not None and result.kind == "probe" else ""
    else:
        declared = next((r.reason for r in matrix.refusals if f"refusal-{r.name}" == result.id), "")
    short = bool(fell_short([result]))
    style = "bad" if short else "good" if result.outcome is Outcome.PASSED else ""
    facts = [f"{result.margin} of budget"] * bool(result.margin)
    facts += [f"{result.captures} captured, {result.replays} replays"] * bool(result.captures)
    facts += [declared] * bool(declared) + [_device(told)]
    line = (
        f'<span class="row"><span class="outcome {style}">{result.outcome}</span>'
        f'<span class="id">{escape(result.id)}</span>'
        f'<span class="more">{escape("; ".join(facts))}</span></span>'
    )
    text = told.messages.get(result.id) or result.reason
    body = f"<details{' open' * short}><summary>{line}</summary><pre>{escape(text)}</pre></details>" if text else line
    return (
        f'<li id="{_anchor(index, result.id)}" tabindex="-1" data-id="{escape(result.id)}" '
        f'data-outcome="{result.outcome}" data-short="{int(short)}" data-ratio="{ratio}" data-mode="{escape(mode)}" '
        f'data-device="{escape(_device(told))}">{body}</li>'
    )


def _ordered(told: Told) -> list[Result]:
    """What fell short first, then what was not run, then passes; by id within."""
    return sorted(told.report.results, key=_severity)


def _severity(result: Result) -> tuple[int, str]:
    return (0 if fell_short([result]) else 2 if result.outcome is Outcome.PASSED else 1), result.id


def _by_cell(results: Iterable[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.cell, []).append(result)
    return found


def _device(told: Told) -> str:
    return f"{told.report.header.device_model}, {told.report.header.backend}"


def _anchor(index: int, case_id: str) -> str:
    return f"c{index}-{escape(case_id)}"


def _options(pairs: Iterable[tuple[str, str]]) -> str:
    return "".join(f'<option value="{escape(value)}">{escape(text)}</option>' for value, text in pairs)


def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
