"""The README's blocks: what is written, what counts as drift, and what is said where a marker is missing."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4_matrix.declaration import Matrix
from dsv4_matrix.declaration.model import Level
from dsv4_matrix.declaration.readme import ReadmeError, drift, rendered, update
from dsv4_matrix.declaration.table import cell_markdown, matrix_markdown
from dsv4_matrix.declaration.wording import variant_text

TEXT = "# T\n\n<!-- a:begin -->\nold\n<!-- a:end -->\nkept\n<!-- b:begin --><!-- b:end -->\nend, no newline"
BLOCKS = {"b": "two\n", "a": "one"}


def test_blocks_are_replaced_and_the_rest_is_kept() -> None:
    want = "# T\n\n<!-- a:begin -->\none\n<!-- a:end -->\nkept\n<!-- b:begin -->\ntwo\n<!-- b:end -->\nend, no newline"
    assert rendered(TEXT, BLOCKS, "R") == want
    assert rendered(want, BLOCKS, "R") == want


def test_a_checkout_with_crlf_is_no_drift_and_stays_one() -> None:
    want = rendered(TEXT, BLOCKS, "R").replace("\n", "\r\n")
    assert rendered(TEXT.replace("\n", "\r\n"), BLOCKS, "R") == want
    assert rendered(want, BLOCKS, "R") == want


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<!-- a:begin -->", "", "R: no <!-- a:begin -->; put it on a line of its own where the block belongs"),
        ("<!-- b:end -->", "", "R: no <!-- b:end -->; put it on a line of its own where the block belongs"),
        ("kept", "<!-- a:end -->", "R:6: a second <!-- a:end --> (first: line 5); keep one of them"),
        ("# T", "<!-- a:end -->", "R:5: a second <!-- a:end --> (first: line 1); keep one of them"),
        ("<!-- b:begin --><!-- b:end -->", "<!-- b:end --><!-- b:begin -->", "R:7: <!-- b:end --> stands before"),
        ("old", "<!-- b:begin --><!-- b:end -->", "R:7: a second <!-- b:begin --> (first: line 4); keep one"),
    ],
)
def test_marker_mistakes_are_clear(old: str, new: str, message: str) -> None:
    with pytest.raises(ReadmeError) as caught:
        rendered(TEXT.replace(old, new, 1), BLOCKS, "R")
    assert str(caught.value).startswith(message)


def test_block_inside_another_is_refused() -> None:
    text = "<!-- a:begin -->\n<!-- b:begin --><!-- b:end -->\n<!-- a:end -->\n"
    with pytest.raises(ReadmeError, match="the block b begins inside the block a"):
        rendered(text, BLOCKS, "R")


def test_drift_shows_a_diff_and_the_command(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(TEXT, encoding="utf-8")
    lines = drift(path, BLOCKS, "the command").splitlines()
    assert "-old" in lines
    assert "+one" in lines
    assert lines[-1] == f"{path} is behind; bring it up to date with: the command"
    assert update(path, BLOCKS)
    assert drift(path, BLOCKS, "the command") == ""
    assert not update(path, BLOCKS)


def test_one_changed_character_is_drift(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(TEXT, encoding="utf-8")
    update(path, BLOCKS)
    path.write_text(path.read_text(encoding="utf-8").replace("one", "one "), encoding="utf-8")
    assert drift(path, BLOCKS, "x")


def test_update_keeps_mode_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(TEXT, encoding="utf-8")
    path.chmod(0o640)
    update(path, BLOCKS)
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["README.md"]


def test_failed_write_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "README.md"
    path.write_text(TEXT, encoding="utf-8")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(ReadmeError, match=r"cannot be written \(No space left on device\); it is as it was"):
        update(path, BLOCKS)
    assert path.read_text(encoding="utf-8") == TEXT
    assert os.listdir(tmp_path) == ["README.md"]


@pytest.mark.parametrize(("content", "message"), [(None, "cannot be read"), (b"\xff\xfe", "is not UTF-8 text")])
def test_unreadable_readme_is_said(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "README.md"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ReadmeError, match=message):
        update(path, BLOCKS)


def test_table_has_a_row_a_ratio_and_a_column_a_mode(own_matrix: Matrix) -> None:
    lines = matrix_markdown(own_matrix).splitlines()
    head = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert head == ["ratio", *(mode.title for mode in own_matrix.modes)]
    for ratio, line in zip(own_matrix.ratios, lines[2:5], strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells == [str(ratio), *(cell_markdown(own_matrix.cell(f"r{ratio}/{m.name}")) for m in own_matrix.modes)]


def test_a_promise_is_shown_with_its_cell(small_matrix: Matrix) -> None:
    promised = replace(small_matrix.cells[0], promise=Level.GRAPH)
    assert cell_markdown(promised) == "✓ 2 variants, L3"


def test_cells_have_the_form_of_their_state(small_matrix: Matrix) -> None:
    texts = [cell_markdown(cell) for cell in small_matrix.cells]
    assert texts == [
        "✓ 2 variants",
        "✓ 1 variant",
        "deferred: Ratio 4 is not wired up yet.",
        "blocked: Verify needs a selection for each row.",
    ]


def test_every_variant_reason_and_refusal_is_in_the_readme(own_matrix: Matrix) -> None:
    text = matrix_markdown(own_matrix)
    for cell in own_matrix.cells:
        for variant in cell.variants:
            assert f"- `{variant.name}`: {variant_text(variant)}\n" in text
        if not cell.variants:
            assert f"- `{cell.id}`, {cell.state.value}: {cell.reason}" in text
    for refusal in own_matrix.refusals:
        assert f"- `{refusal.name}`: " in text


def test_reason_cannot_break_the_table(small_matrix: Matrix) -> None:
    cell = replace(small_matrix.cell("r4/eager"), reason="a | b <img> [x](y) `z` *w*")
    assert cell_markdown(cell) == r"deferred: a \| b \<img\> \[x\](y) \`z\` \*w\*"


def test_table_depends_on_the_declaration_alone(small: str, small_matrix: Matrix) -> None:
    assert matrix_markdown(replace(small_matrix, path="/elsewhere", sha256="0")) == matrix_markdown(small_matrix)


@pytest.mark.parametrize(
    ("cell", "name", "text"),
    [
        ("r0/eager", "extend", "extend 0/32"),
        ("r0/eager", "decode", "decode (32, 96)"),
        (
            "r0/verify-cg",
            "chain",
            "chain from (64, 96) with 3 draft tokens; keeping (1, 2), rejected slots written again by the next step; "
            "replayed over 65, idle, 66",
        ),
    ],
)
def test_variant_in_words(small_matrix: Matrix, cell: str, name: str, text: str) -> None:
    variants = {variant.name: variant for variant in small_matrix.cell(cell).variants}
    assert variant_text(variants[name]) == text


def test_sweeps_are_summed_up(own_matrix: Matrix) -> None:
    sweep = next(v for v in own_matrix.cell("r0/verify-eager").variants if v.name == "every-acceptance")
    assert variant_text(sweep) == (
        "chain from (32 from 124 to 253) with 8 draft tokens; keeping (32 from 1 to 8), rejected slots written again "
        "by the next step; 16 heads, per-head sinks, history outside the window freed, GPU only"
    )


def test_no_two_variants_of_a_cell_read_alike(own_matrix: Matrix) -> None:
    for cell in own_matrix.cells:
        texts = [variant_text(variant) for variant in cell.variants]
        assert len(set(texts)) == len(texts), cell.id
