"""What a run leaves: lines, a document that can be read again, Markdown and a plot, all from made-up times."""

from __future__ import annotations

import dataclasses
import json
import math
import xml.etree.ElementTree as ElementTree

import pytest

from dsv4_matrix.bench import document, present
from dsv4_matrix.bench.markdown import markdown
from dsv4_matrix.bench.plot import Axis, svg
from dsv4_matrix.bench.results import LONG_CONTEXT, PEER_TABLE, StepMeasurement, ladders, summarise


def test_a_row_of_the_table(result, c4):
    columns = "c4-h64-k640-b64-q2 50.0 49.0-51.0 15.0 13.6 3.3 56.1 1.12 portable"
    assert present.line(result(c4, 50.0, 56.1)).split() == columns.split()
    assert present.line(result(c4, 50.0, None)).split() == [
        "c4-h64-k640-b64-q2",
        "50.0",
        "49.0-51.0",
        "15.0",
        "13.6",
        "3.3",
        "portable",
    ]
    assert present.line(result(c4, 50.0, 56.1)).index("portable") == present.HEADER.index("kernel")


def test_side_by_side_goes_before_the_table(result, c4):
    assert result(c4, 50.0, 56.1, beside=40.0).ratio == pytest.approx(0.8)


def test_the_summary_is_of_the_peers_table_alone(results, result, c4):
    said = "geometric mean 0.749 (goal 1.15), worst 0.500 of c4-h64-k640-b1-q2 (goal 0.95)"
    assert said in present.comparison(results)
    results.groups[LONG_CONTEXT].append(result(c4, 1.0, 56.1))
    assert said in present.comparison(results)
    del results.groups[PEER_TABLE]
    assert present.comparison(results) == ""
    assert summarise([]) is None


@pytest.mark.parametrize(
    ("step", "goal"),
    [
        (StepMeasurement("x", 20.0, "us", at_most=20), "at most 20: met"),
        (StepMeasurement("x", 20.1, "us", at_most=20), "at most 20: not met"),
        (StepMeasurement("x", 70.0, "%", at_least=70), "at least 70: met"),
        (StepMeasurement("x", 69.9, "%", at_least=70), "at least 70: not met"),
        (StepMeasurement("x", 0.0, "us"), ""),
    ],
)
def test_a_step_says_whether_its_goal_is_met(step, goal):
    assert step.goal == goal
    assert present.step_line(step).endswith(goal)


def test_a_ladder_tells_linear_cost_from_growth(result, c4):
    def rung(extra, median):
        return result(dataclasses.replace(c4, extra_topk=extra), median, None)

    # 128 rows; 640 and 1152 keys
    (linear,) = ladders([rung(1024, 115.2), rung(512, 64.0), result(dataclasses.replace(c4, batch=1), 9.0, None)])
    assert linear.name == "c4-h64-b64-q2"
    assert [one.shape.keys for one in linear.rungs] == [640, 1152]
    assert linear.growth == pytest.approx(1.0)
    (square,) = ladders([rung(512, 64.0), rung(1024, 64.0 * 1.8**2)])
    assert square.growth == pytest.approx(1.8)
    assert ladders([rung(512, 64.0)]) == []
    lines = present.ladder_lines([rung(1024, 115.2), rung(512, 64.0)])
    assert lines == ["c4-h64-b64-q2: ps a key and row at 640: 781, 1152: 781; longest over shortest 1.00"]


def test_a_document_comes_back_as_it_was(results, tmp_path):
    path = tmp_path / "bench.json"
    document.write(results, path)
    assert document.read(path) == results
    assert [file.name for file in tmp_path.iterdir()] == ["bench.json"]
    found = json.loads(path.read_text())
    assert found["shapes"][PEER_TABLE][0]["name"] == "c4-h64-k640-b64-q2"
    assert found["shapes"][PEER_TABLE][0]["choice"].startswith("portable: ")
    assert found["summary"] == {"geometric_mean": pytest.approx(0.749, abs=1e-3), "worst": "c4-h64-k640-b1-q2"}
    assert found["steps"][1]["goal"] == "at least 70: not met"
    assert found["kernels"][0]["registers"] == 55


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "bench --json' of schema 1; this is not JSON: Expecting value"),
        ("[]", "expected a document of 'dsv4-matrix bench --json' of schema 1"),
        ('{"schema": 0}', "expected a document of 'dsv4-matrix bench --json' of schema 1"),
        ('{"schema": 1}', "the document: expected an object with schema, finished, machine, ceilings, planned, "),
    ],
)
def test_another_file_is_refused_by_name(text, said, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(document.DocumentError) as error:
        document.read(path)
    assert str(path) in str(error.value)
    assert said in str(error.value)


def test_a_document_that_cannot_be_written_is_an_error_of_the_command(results, tmp_path):
    with pytest.raises(document.DocumentError, match="absent"):
        document.write(results, tmp_path / "absent" / "bench.json")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(document.DocumentError, match="No such file"):
        document.read(tmp_path / "nothing.json")


def test_markdown_has_each_part_and_no_other(results):
    text = markdown(results)
    assert "| c4-h64-k640-b64-q2 | 50.0 | 49.0 to 51.0 | 15.0 | 13.6 | 3.3 | 56.1 | 1.12 | portable |" in text
    assert "| c4-h64-b64-q2 | 640: 610, 1152: 549 | 0.90 |" in text
    assert "| store | 66.0 % | at least 70: not met |" in text
    assert "| `dsv4_triton.store._pack_and_store` MAPPED=1 ROWS=8 | 4 | 55 | 0 | 64 |" in text
    assert "portable: the portable kernel is the default." in text
    assert "cut short" not in text
    widths = {line.count("|") for line in text.split("\n\n")[2].splitlines()}
    assert len(widths) == 1
    results.groups, results.steps, results.kernels = {}, [], []
    assert markdown(results).count("|") == 0


def test_a_run_cut_short_says_so_everywhere(results):
    results.planned[PEER_TABLE], results.finished = 41, False
    for text in (markdown(results), "\n".join(present.closing(results))):
        assert "cut short: 2 of 41 shapes of the peer table" in text
        assert "cut short: the run did not come to its end" in text


def test_the_plot_places_every_time_on_one_axis(results):
    root = ElementTree.fromstring(svg(results.everything, "a < b"))
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "a < b"
    assert [text for text in texts if text and text.startswith("c4-")] == [one.shape.name for one in results.everything]
    dots = [float(node.get("cx", "nan")) for node in root.iter("{http://www.w3.org/2000/svg}circle")][1:]
    medians = [one.median for one in results.everything]
    assert sorted(range(4), key=dots.__getitem__) == sorted(range(4), key=medians.__getitem__)
    crosses = [node.get("d", "") for node in root.iter("{http://www.w3.org/2000/svg}path")]
    assert len(crosses) == 1 + 3, "the legend's, and one a known time of the peer"
    with pytest.raises(ValueError, match="at least one"):
        svg([], "nothing")


def test_the_axis_is_logarithmic():
    axis = Axis([1.0, 100.0])
    assert axis.at(10.0) - axis.at(1.0) == pytest.approx(axis.at(100.0) - axis.at(10.0))
    assert list(axis.ticks()) == [1, 2, 5, 10, 20, 50, 100]
    assert all(math.isfinite(axis.at(tick)) for tick in Axis([3.0, 3.0]).ticks())
