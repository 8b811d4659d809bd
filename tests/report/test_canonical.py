"""The canonical file: golden bytes, no trace of arrival order, and no way in for anything else."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_matrix.report import canonical
from dsv4_matrix.report.canonical import ReportError, dumps, loads
from dsv4_matrix.report.result import Header, Outcome, Report, Result

GOLDEN = (
    '{"backend":"triton","device_model":"NVIDIA H200","fingerprint":"' + "cd" * 32 + '","matrix_sha256":"' + "ab" * 32
    + '","schema":"dsv4-matrix-report/1","torch":"2.11.0","triton":"3.6.0"}\n'
    '{"captures":0,"cell":"r0/cg-decode","id":"r0-cg-decode-huge","kind":"case","margin":"","outcome":"not-run",'
    '"reason":"declared for gpu only","replays":0}\n'
    '{"captures":1,"cell":"r0/cg-decode","id":"r0-cg-decode-small","kind":"case","margin":"0.31","outcome":"passed",'
    '"reason":"","replays":4}\n'
    '{"captures":0,"cell":"r0/eager","id":"r0-eager-a","kind":"case","margin":"0.62","outcome":"passed","reason":"",'
    '"replays":0}\n'
    '{"captures":0,"cell":"r0/eager","id":"r0-eager-b","kind":"case","margin":"12","outcome":"failed",'
    '"reason":"worst at row 3: \\u00fc","replays":0}\n'
    '{"captures":0,"cell":"r4/cg-decode","id":"r4-cg-decode-refused","kind":"probe","margin":"","outcome":"passed",'
    '"reason":"","replays":0}\n'
    '{"captures":0,"cell":"r4/eager","id":"r4-eager-refused","kind":"probe","margin":"","outcome":"passed","reason":"",'
    '"replays":0}\n'
    '{"captures":0,"cell":"","id":"refusal-head-dim","kind":"refusal","margin":"","outcome":"passed","reason":"",'
    '"replays":0}\n'
)  # fmt: skip


def test_golden_bytes(report: Report) -> None:
    assert dumps(report).decode() == GOLDEN


def test_any_order_of_arrival_gives_the_same_bytes(report: Report) -> None:
    for order in permutations(report.results[:5]):
        assert dumps(replace(report, results=(*report.results[5:], *order))).decode() == GOLDEN


def test_reading_gives_back_what_was_written(report: Report, tmp_path: Path) -> None:
    canonical.write(report, tmp_path / "report.jsonl")
    assert canonical.read(tmp_path / "report.jsonl") == report


_WORDS = st.text(max_size=20)


@given(
    st.lists(
        st.builds(
            Result,
            id=st.text(alphabet="abcxyz0189-", min_size=1, max_size=12),
            cell=_WORDS,
            kind=st.sampled_from(canonical.KINDS),
            outcome=st.sampled_from([outcome for outcome in Outcome if outcome is not Outcome.PASSED]),
            reason=_WORDS,
            margin=st.sampled_from(["", "0.50", "inf", "nan"]),
            captures=st.integers(0, 2**31 - 1),
            replays=st.integers(0, 2**31 - 1),
        ),
        unique_by=lambda result: result.id,
    ),
    st.randoms(use_true_random=False),
)
def test_round_trip_whatever_the_text(results: list[Result], random: object) -> None:
    header = Header("a", "b", "c", "d", "e", "f")
    data = dumps(Report(header, tuple(results)))
    random.shuffle(results)  # type: ignore[attr-defined]
    assert dumps(Report(header, tuple(results))) == data
    assert dumps(loads(data)) == data


def test_two_results_for_a_case_are_refused(report: Report) -> None:
    with pytest.raises(ReportError, match="case r0-eager-a has two results"):
        dumps(replace(report, results=(*report.results, report.results[2])))


def _line(number: int, old: str, new: str) -> str:
    lines = GOLDEN.split("\n")
    assert old in lines[number - 1]
    lines[number - 1] = lines[number - 1].replace(old, new)
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (GOLDEN[:-1], "no newline; the file is truncated"),
        (GOLDEN.replace("\\u00fc", "ü"), "not ASCII"),
        ("", "no newline"),
        (_line(1, '"schema":"dsv4-matrix-report/1",', ""), "r.jsonl:1: missing schema"),
        (_line(1, "report/1", "report/9"), "r.jsonl:1: schema dsv4-matrix-report/9 is not"),
        (_line(1, '"triton":"3.6.0"', '"time":"now","triton":"3.6.0"'), "r.jsonl:1: unknown time"),
        (_line(3, '"replays":4', '"replays":4,"seconds":1'), "r.jsonl:3: unknown seconds; allowed are"),
        (_line(3, '"replays":4', '"replays":"4"'), "r.jsonl:3: replays must be int, got '4'"),
        (_line(3, '"replays":4', '"replays":true'), "r.jsonl:3: replays must be int, got True"),
        (_line(3, '"replays":4', '"replays":-4'), "r.jsonl:3: captures and replays are counts"),
        (_line(3, '"margin":"0.31"', '"margin":0.31'), "r.jsonl:3: margin must be str"),
        (_line(3, '"margin":"0.31"', '"margin":"fine"'), "r.jsonl:3: margin 'fine' is not a number"),
        (_line(3, '"margin":"0.31"', '"margin":"-0.31"'), "r.jsonl:3: margin -0.31 does not go with outcome passed"),
        (_line(3, '"margin":"0.31"', '"margin":"1.1"'), "r.jsonl:3: margin 1.1 does not go with outcome passed"),
        (_line(3, '"margin":"0.31"', '"margin":"nan"'), "r.jsonl:3: margin nan does not go with outcome passed"),
        (_line(3, '"replays":4', '"replays":' + "4" * 5000), "r.jsonl:3: not a line of a report: Exceeds the limit"),
        (_line(3, '"replays":4', '"replays":NaN'), "r.jsonl:3: not a line of a report: NaN is no JSON number"),
        (_line(3, '"replays":4', '"replays":' + "[" * 100_000), "r.jsonl:3: not a line of a report: maximum recursion"),
        (_line(3, "passed", "skipped"), "r.jsonl:3: outcome 'skipped' is none of passed, failed"),
        (_line(3, '"kind":"case"', '"kind":"cell"'), "r.jsonl:3: kind 'cell' is none of case, probe, refusal"),
        (_line(3, '"captures":1,', '"captures": 1,'), "r.jsonl:3: not in canonical form"),
        (_line(3, '"captures":1,', '"captures":1,"captures":1,'), "r.jsonl:3: a key occurs twice"),
        (_line(3, "}", ""), "r.jsonl:3: not JSON"),
        ("{\n}\n", "; expected JSON Lines as 'dsv4-matrix run --report' writes them"),
        (_line(3, GOLDEN.split("\n")[2], "[]"), "r.jsonl:3: expected an object, got list"),
        (_line(4, "r0-eager-a", "r0-aaa"), "r.jsonl:4: case r0-aaa stands after r0-cg-decode-small"),
        (_line(5, "r0-eager-b", "r0-eager-a"), "r.jsonl:5: case r0-eager-a occurs twice"),
        (GOLDEN + "\n", "r.jsonl:9: not JSON"),
    ],
)
def test_what_is_not_canonical_is_refused_with_its_place(text: str, told: str) -> None:
    with pytest.raises(ReportError) as caught:
        loads(text.encode(), "r.jsonl")
    assert told in str(caught.value)


def test_reserved_keys_of_later_schemas_are_read_and_dropped(report: Report) -> None:
    text = _line(1, '"device_model"', '"device_model"').replace(
        '{"backend":"triton","device_model":"NVIDIA H200",',
        '{"backend":"triton","device_model":"NVIDIA H200","environment":{"NCCL_ALGO":"Ring"},',
    )
    text = text.replace(
        '"cell":"r0/eager","id":"r0-eager-a"', '"cell":"r0/eager","digests":{"out":"ff"},"id":"r0-eager-a"'
    )
    assert loads(text.encode()) == report


def test_writing_fails_whole(report: Report, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="there is no directory"):
        canonical.check_writable(tmp_path / "absent" / "report.jsonl")
    with pytest.raises(ReportError, match="is a directory; name a file in it"):
        canonical.check_writable(tmp_path)
    with pytest.raises(ReportError, match="cannot write the report: No such file"):
        canonical.write(report, tmp_path / "absent" / "report.jsonl")
    target = tmp_path / "report.jsonl"
    target.mkdir()
    with pytest.raises(ReportError, match="cannot write the report"):
        canonical.write(report, target)
    assert [path.name for path in tmp_path.iterdir()] == ["report.jsonl"], "a temporary file was left behind"
