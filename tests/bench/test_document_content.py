"""A document's values: each wrong one is told by its place, before anything is printed; good ones render as ever."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4_matrix.bench import content, document
from dsv4_matrix.bench.command import run_bench
from dsv4_matrix.bench.markdown import markdown
from dsv4_matrix.bench.request import Request
from dsv4_matrix.bench.results import LONG_CONTEXT, PEER_TABLE
from dsv4_matrix.cli import main

#: a document as it was written before values were checked, and what came of it then
RENDERED = Path(__file__).parent / "rendered"
NAN, INFINITY = float("nan"), float("inf")
TIME = "expected a number from 1e-09 to 1e+18, got"
FIRST = ("shapes", PEER_TABLE, 0)
AT = 'shapes["peer table"][0]'


class _Gone:
    def __repr__(self) -> str:
        return "gone"


#: a value that is left out
GONE = _Gone()


@pytest.fixture
def written(results) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(document.to_json(results))
    return found


def change(values: Any, place: tuple[str | int, ...], value: object) -> None:
    *way, last = place
    for step in way:
        values = values[step]
    if value is GONE:
        del values[last]
    else:
        values[last] = value


Refused = Callable[[dict[str, Any]], str]


@pytest.fixture
def refused(tmp_path, capsys) -> Refused:
    """Render a document in every way; what it is refused with, the same each time and nothing beside it."""

    def render(values: dict[str, Any]) -> str:
        path, plot = tmp_path / "bench.json", tmp_path / "bench.svg"
        path.write_text(json.dumps(values))
        said = set()
        for options in ([], ["--table"], ["--plot", str(plot)], ["--table", "--plot", str(plot)]):
            assert main(["bench", "--from", str(path), *options]) == 2
            out, err = capsys.readouterr()
            assert out == ""
            assert not plot.exists()
            said.add(err)
        (line,) = said
        start = f"dsv4-matrix bench: {path}: "
        assert line.startswith(start)
        assert line.count("\n") == 1
        return line.removeprefix(start).removesuffix("\n")

    return render


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        # times
        ((*FIRST, "median"), 0, f"{AT}.median: {TIME} 0"),
        ((*FIRST, "median"), -3, f"{AT}.median: {TIME} -3"),
        ((*FIRST, "median"), "12", f'{AT}.median: {TIME} "12"'),
        ((*FIRST, "median"), None, f"{AT}.median: {TIME} null"),
        ((*FIRST, "median"), True, f"{AT}.median: {TIME} true"),
        ((*FIRST, "median"), NAN, f"{AT}.median: {TIME} NaN"),
        ((*FIRST, "median"), INFINITY, f"{AT}.median: {TIME} Infinity"),
        ((*FIRST, "median"), 10**400, f"{AT}.median: {TIME} 1{'0' * 59}..."),
        ((*FIRST, "median"), 5e-324, f"{AT}.median: {TIME} 5e-324"),
        ((*FIRST, "median"), [1], f"{AT}.median: {TIME} a list"),
        ((*FIRST, "median"), 40.0, f"{AT}.low: expected low, median and high in this order, median 40.0, got 49.0"),
        ((*FIRST, "high"), 49.5, f"{AT}.high: expected low, median and high in this order, median 50.0, got 49.5"),
        ((*FIRST, "table"), 0, f"{AT}.table: {TIME} 0"),
        ((*FIRST, "beside"), "40", f'{AT}.beside: {TIME} "40"'),
        ((*FIRST, "memory_floor"), 0, f"{AT}.memory_floor: {TIME} 0"),
        ((*FIRST, "matrix_floor"), 0.0, f"{AT}.matrix_floor: {TIME} 0.0"),
        (("ceilings", "bytes_per_second"), 0, f"ceilings.bytes_per_second: {TIME} 0"),
        (("ceilings", "flops_per_second"), NAN, f"ceilings.flops_per_second: {TIME} NaN"),
        (("ceilings", "flops_per_second"), GONE, "ceilings: expected an object with bytes_per_second, "
         "flops_per_second, got no flops_per_second"),
        # what follows from other values
        ((*FIRST, "ratio"), 7, f"{AT}.ratio: expected 1.122, the peer's time (beside, else table) over the median, "
         "got 7"),
        ((*FIRST, "ratio"), None, f"{AT}.ratio: expected 1.122, the peer's time (beside, else table) over the median, "
         "got null"),
        ((*FIRST, "ratio"), 10**400, f"{AT}.ratio: expected 1.122, the peer's time (beside, else table) over the "
         f"median, got 1{'0' * 59}..."),
        (("shapes", LONG_CONTEXT, 0, "ratio"), 1.0, 'shapes["long context"][0].ratio: expected null, the peer\'s time '
         "(beside, else table) over the median, got 1.0"),
        ((*FIRST, "name"), "mine", f'{AT}.name: expected "c4-h64-k640-b64-q2", which its shape is called, got "mine"'),
        (("summary", "geometric_mean"), 2.0, "summary.geometric_mean: expected 0.748999332442"),
        (("summary", "worst"), "x", 'summary.worst: expected "c4-h64-k640-b1-q2", the shape of the least ratio'),
        (("summary",), None, "summary: expected an object, got null"),
        (("steps", 0, "goal"), "at most 20: not met", 'steps[0].goal: expected "at most 20: met", which the value'),
        # shapes
        ((*FIRST, "shape", "batch"), 0, f"{AT}.shape.batch: expected a whole number of 1 or more, in 64 bits, got 0"),
        ((*FIRST, "shape", "batch"), True, f"{AT}.shape.batch: expected a whole number of 1 or more, in 64 bits, "
         "got true"),
        ((*FIRST, "shape", "topk"), 0, f"{AT}.shape.topk: expected a whole number of 1 or more, in 64 bits, got 0"),
        ((*FIRST, "shape", "heads"), 2**63, f"{AT}.shape.heads: expected a whole number of 1 or more, in 64 bits"),
        ((*FIRST, "shape", "ratio"), 4.0, f"{AT}.shape.ratio: expected a whole number of 0 or more"),
        ((*FIRST, "shape", "shared"), 1, f"{AT}.shape.shared: expected true or false, got 1"),
        ((*FIRST, "shape", "page"), GONE, f"{AT}.shape: expected an object with ratio, heads, batch, s_q, topk, page, "
         "extra_topk, extra_page and perhaps extra_lengths, extra_slots, shared, got no page"),
        ((*FIRST, "shape"), 7, f"{AT}.shape: expected an object, got 7"),
        ((*FIRST, "speed"), 7, f"{AT}: expected an object with shape, median, low, high, memory_floor, matrix_floor, "
         "table, beside and perhaps choice, name, ratio, got an unknown speed"),
        ((*FIRST, "choice"), None, f"{AT}.choice: expected text, got null"),
        (("shapes",), [], "shapes: expected an object, got []"),
        (("shapes", PEER_TABLE), {}, 'shapes["peer table"]: expected a list, got {}'),
        # the rest
        (("machine",), "abc", 'machine: expected an object, got "abc"'),
        (("machine",), {}, "machine: expected an object with kernel, got none"),
        (("machine", "gpu"), GONE, 'machine: expected an object with gpu, got only "kernel", "triton"'),
        (("machine", "gpu"), 1, "machine.gpu: expected text, got 1"),
        (("planned",), {}, 'planned: expected the number of shapes of "peer table" too, got none'),
        (("planned", PEER_TABLE), 1, 'planned["peer table"]: expected at least the 2 shapes that were measured, got 1'),
        (("planned", PEER_TABLE), None, 'planned["peer table"]: expected a whole number of 0 or more'),
        (("steps", 0, "value"), NAN, "steps[0].value: expected a number from 0 to 1e+18, got NaN"),
        (("steps", 0, "at_most"), "20", 'steps[0].at_most: expected a number from 0 to 1e+18, got "20"'),
        (("steps",), None, "steps: expected a list, got null"),
        (("kernels", 0, "registers"), "55", 'kernels[0].registers: expected a whole number of 0 or more, in 64 bits, '
         'got "55"'),
        (("kernels", 0), "x\ny", 'kernels[0]: expected an object, got "x\\ny"'),
        (("finished",), "yes", 'finished: expected true or false, got "yes"'),
        (("finished",), GONE, "the document: expected an object with schema, finished, machine, "),
        (("schema",), True, "expected a document of 'dsv4-matrix bench --json' of schema 1, got schema true"),
        (("schema",), 1.0, "expected a document of 'dsv4-matrix bench --json' of schema 1, got schema 1.0"),
        (("schema",), GONE, "expected a document of 'dsv4-matrix bench --json' of schema 1, got schema null"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told_by_its_place(written, refused, place, value, said):
    change(written, place, value)
    assert refused(written).startswith(said)


def places(values: Any, way: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Of every value in a document, objects and lists too."""
    inside = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for step, value in inside:
        yield (*way, step)
        yield from places(value, (*way, step))


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -1, 1e18, 2**63 - 1, pytest.param(10**400, id="huge"), NAN, "\ud800", [], {}, GONE],
    ids=ascii,
)
def test_no_single_value_brings_a_traceback(results, value, tmp_path, capsys):
    path, plot = tmp_path / "bench.json", tmp_path / "bench.svg"
    text = document.to_json(results)
    for place in places(json.loads(text)):
        values = json.loads(text)
        change(values, place, value)
        path.write_text(json.dumps(values))
        for request in (Request(source=path, plot=plot), Request(source=path, table=True)):
            status = run_bench(request)
            out, err = capsys.readouterr()
            assert (status, bool(out), err.count("\n")) in ((0, True, 0), (2, False, 1)), place


def test_floors_of_nothing_are_refused(written, refused):
    change(written, (*FIRST, "memory_floor"), 0)
    change(written, (*FIRST, "matrix_floor"), 0)
    assert refused(written) == f"{AT}.memory_floor: {TIME} 0"


def test_a_summary_of_nothing_is_refused(written, refused):
    written["shapes"][PEER_TABLE] = []
    assert refused(written).startswith("summary: expected null, as no shape of the peer's table has a peer's time")


def test_json_too_deep_for_its_reader_is_refused(tmp_path):
    path = tmp_path / "deep.json"
    path.write_text("[" * 200_000)
    with pytest.raises(document.DocumentError, match="this is not JSON"):
        document.read(path)


def test_what_a_plot_cannot_show_is_told_before_anything_is_printed(results, tmp_path, capsys):
    results.groups = {}
    document.write(results, tmp_path / "bench.json")
    assert main(["bench", "--from", str(tmp_path / "bench.json"), "--plot", str(tmp_path / "bench.svg")]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", ["CEILINGS", "SHAPE", "MEASUREMENT", "STEP", "KERNEL"])
def test_every_field_has_its_reader(kind):
    """One without a reader would be refused as unknown, or fall back to its default in silence."""
    kinds = {
        "CEILINGS": content.Ceilings,
        "SHAPE": content.Shape,
        "MEASUREMENT": content.Measurement,
        "STEP": content.StepMeasurement,
        "KERNEL": content.KernelResources,
    }
    assert list(getattr(content, kind)) == [field.name for field in dataclasses.fields(kinds[kind])]


def test_a_good_document_renders_as_before_values_were_checked(tmp_path, capsys):
    source, plot = str(RENDERED / "bench.json"), tmp_path / "plot.svg"
    assert main(["bench", "--from", source]) == 0
    assert capsys.readouterr() == ((RENDERED / "printed.txt").read_text("utf-8"), "")
    assert main(["bench", "--from", source, "--table", "--plot", str(plot)]) == 0
    assert capsys.readouterr() == ((RENDERED / "table.txt").read_text("utf-8"), "")
    assert plot.read_bytes() == (RENDERED / "plot.svg").read_bytes()


def test_that_document_is_read_as_what_was_measured(results):
    assert document.read(RENDERED / "bench.json") == results


def test_older_documents_may_leave_out_what_has_a_default_or_follows(written, results, tmp_path):
    del written["summary"]
    for group in written["shapes"].values():
        for one in group:
            del one["name"], one["ratio"]
            for name in ("extra_lengths", "shared", "extra_slots"):
                del one["shape"][name]
    for step in written["steps"]:
        del step["goal"]
    del written["steps"][0]["at_least"]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(written))
    assert document.read(path) == results


def test_a_run_cut_short_is_read_as_it_is(results, tmp_path):
    del results.groups[LONG_CONTEXT]
    results.groups[PEER_TABLE], results.finished = [], False
    document.write(results, tmp_path / "bench.json")
    assert document.read(tmp_path / "bench.json") == results


def test_steps_alone_name_no_kernel(results, tmp_path):
    results.groups, results.planned, results.machine = {}, {}, {"backend": "mine", "gpu": "NVIDIA H200"}
    document.write(results, tmp_path / "bench.json")
    assert document.read(tmp_path / "bench.json") == results


@pytest.fixture
def wordy(results):
    """Words of others that would leave their line, their cell or the terminal's encoding."""
    odd = "a | b\\|\n\n| c |\r\x1b[2J\u2028\ud800"
    results.machine = {"kernel": odd, "gpu": "NVIDIA H200"}
    results.groups = {
        name: [dataclasses.replace(one, choice=f"{odd}: why\n# not") for one in group]
        for name, group in results.groups.items()
    }
    results.steps = [dataclasses.replace(step, name=odd, unit="u\ns") for step in results.steps]
    results.kernels = [dataclasses.replace(kernel, name=odd, variant="A\nB") for kernel in results.kernels]
    return results


def lines_of(text: str) -> int:
    assert all(character.isprintable() or character == "\n" for character in text)
    return text.count("\n")


def test_words_of_others_keep_to_their_line(wordy, tmp_path, capsys):
    path, plot = tmp_path / "bench.json", tmp_path / "bench.svg"
    document.write(wordy, path)
    assert document.read(path) == wordy
    assert main(["bench", "--from", str(path), "--plot", str(plot)]) == 0
    assert lines_of(capsys.readouterr().out) == lines_of((RENDERED / "printed.txt").read_text("utf-8"))
    title = ElementTree.fromstring(plot.read_text("utf-8")).findtext("{http://www.w3.org/2000/svg}text")
    assert title is not None
    assert title.startswith("a | b\\|  | c |")
    assert lines_of(plot.read_text("utf-8")) == lines_of((RENDERED / "plot.svg").read_text("utf-8"))


def test_words_of_others_keep_to_their_cell(wordy, results):
    text = markdown(wordy)
    assert lines_of(text) == lines_of((RENDERED / "table.txt").read_text("utf-8"))
    for part in text.split("\n\n"):
        rows = part.splitlines()
        if rows[0].startswith("| "):
            # two backslashes are one that is shown, and one before a bar takes it into the cell
            bars = {row.replace("\\\\", "").replace("\\|", "").count("|") for row in rows}
            assert len(bars) == 1, part


@pytest.mark.parametrize("name", ["two\nlines", "tabbed\tname"])
def test_a_groups_name_keeps_to_its_line(written, tmp_path, capsys, name):
    written["shapes"][name], written["planned"][name] = [], 3
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(written))
    assert main(["bench", "--from", str(path)]) == 0
    out = capsys.readouterr().out
    shown = " ".join(name.split())
    assert f"\n{shown}:\n" in out
    assert f"cut short: 0 of 3 shapes of the {shown}\n" in out
