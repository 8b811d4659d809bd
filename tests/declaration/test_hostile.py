"""Hostile YAML ends in one clear DeclarationError, in bounded work: never a traceback, an expansion or an import."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4_matrix.declaration import DeclarationError, Matrix, Mistake, load_matrix, read_matrix
from dsv4_matrix.declaration.source import MAX_BYTES, MAX_DEPTH, MAX_LINE, MAX_NODES

LAUGHS = b"a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n"

ONE_MISTAKE = [
    ("empty", b"", "1:1: found an empty file; allowed: a mapping with the key schema"),
    ("blank", b"\n  \n", "1:1: found an empty file; allowed: a mapping with the key schema"),
    ("comment-only", b"# nothing\n", "1:1: found a file without a value; allowed: a mapping with the key schema"),
    ("list", b"- schema: 1\n", "1:1: found a list of 1; allowed: a mapping: the matrix with schema, "),
    ("text", b"schema\n", "1:1: found the text 'schema'; allowed: a mapping: the matrix with schema, "),
    ("number", b"1\n", "1:1: found the number 1; allowed: a mapping: the matrix with schema, "),
    ("anchor", LAUGHS, "1:4: found the anchor &a; allowed: values without anchors"),
    ("alias", b"a: *x\n", "1:4: found the alias *x; allowed: values written out"),
    ("merge-key", b"a:\n  <<: {b: 1}\n", "2:3: found the merge key <<; allowed: values written out"),
    ("tag", b"a: !!python/object/apply:os.system [id]\n", "1:4: found the tag 'tag:yaml.org,2002:python/object/app"),
    ("local-tag", b"schema: !int 1\n", "1:9: found the tag '!int'; allowed: values without tags"),
    ("directive", b"%YAML 1.1\n---\nschema: 1\n", "2:1: found a YAML directive; allowed: a document without %"),
    ("two-documents", b"schema: 1\n---\nschema: 1\n", "2:1: found a second document; allowed: one document"),
    ("list-as-key", b"? [a, b]\n: 1\n", "1:3: found a list or mapping used as a key; allowed: plain text keys"),
    ("tab", b"schema: 1\nmodes:\n\teager: x\n", "3:1: found invalid YAML (found character '\\t' that cannot start"),
    ("open-bracket", b"schema: [1\n", "2:1: found invalid YAML (expected ',' or ']', but got '<stream end>')"),
    ("open-quote", b'schema: "1\n', "2:1: found invalid YAML (found unexpected end of stream); allowed: valid YAML"),
    ("two-colons", b"schema: 1: 2\n", "1:10: found invalid YAML (mapping values are not allowed here)"),
    ("escape", b'schema: "\\UFFFFFFFF"\n', "1:1: found YAML that the parser breaks on ("),
    ("nul", b"schema: 1\nratios: \x00\n", "2:9: found invalid YAML (special characters are not allowed)"),
    (
        "not-utf-8",
        "schema: 1\n# é".encode() + b"\xff\n",
        "2:4: found the byte 0xff, which is not UTF-8; allowed: UTF-8",
    ),
    ("utf-16", "schema: 1\n".encode("utf-16"), "1:1: found the byte 0xff, which is not UTF-8; allowed: UTF-8 text"),
    ("binary", bytes(range(256)), "2:118: found the byte 0x80, which is not UTF-8; allowed: UTF-8 text"),
    ("deep-flow", b"a: " + b"[" * 4000, f"1:{MAX_DEPTH + 3}: found nesting deeper than {MAX_DEPTH} levels"),
    ("deep-block", b"- " * 2000, f"1:{2 * MAX_DEPTH + 1}: found nesting deeper than {MAX_DEPTH} levels"),
    ("many-values", b"a: [\n" + b"1,\n" * MAX_NODES + b"]", f"{MAX_NODES - 1}:1: found more than {MAX_NODES} values"),
    ("long-line", b"a: 1\n" + b"!" * 500_000, f"2:{MAX_LINE + 1}: found a line of 500000 characters; allowed: at most"),
    (
        "large",
        b"#" * (MAX_BYTES + 1),
        f"1:1: found a file of {MAX_BYTES + 1} bytes; allowed: at most {MAX_BYTES} bytes",
    ),
]


@pytest.mark.parametrize(("name", "data", "text"), ONE_MISTAKE, ids=[row[0] for row in ONE_MISTAKE])
def test_hostile_file_is_one_clear_mistake(name: str, data: bytes, text: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        read_matrix(data, "m.yaml")
    assert len(caught.value.mistakes) == 1
    assert str(caught.value).startswith(f"m.yaml:{text}")


def test_large_file_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "matrix.yaml"
    with path.open("wb") as stream:
        stream.truncate(1 << 40)  # sparse: no bytes on disk, but more than fits in memory
    with pytest.raises(DeclarationError, match=f"found a file of {1 << 40} bytes; allowed: at most {MAX_BYTES} bytes"):
        load_matrix(path)


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_unreadable_file_is_a_mistake(tmp_path: Path, name: str) -> None:
    with pytest.raises(DeclarationError, match=r"found no readable file \(.+\); allowed: the path of a matrix.yaml"):
        load_matrix(tmp_path / name)


@pytest.mark.parametrize("given", ["../mine", "gone/../../mine", "gone.yaml"])
def test_an_unreadable_file_is_named_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """Resolved, the folder that one stands in was told as ``.``. A run gives the path from the working directory."""
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    for path in (Path(given), Path.cwd() / given):
        with pytest.raises(DeclarationError) as caught:
            load_matrix(path)
        assert str(caught.value).startswith(f"{given}:1:1: found no readable file (")


def test_byte_order_mark_is_accepted(small: str) -> None:
    assert read_matrix(b"\xef\xbb\xbf" + small.encode(), "m.yaml").ratios == (0, 4)


def test_windows_line_ends_are_accepted(small: str, small_matrix: Matrix) -> None:
    assert read_matrix(small.replace("\n", "\r\n").encode(), "small.yaml").cells == small_matrix.cells


def _read_or_refuse(data: bytes) -> None:
    """The property: a Matrix, or a DeclarationError with places inside the file."""
    mistakes: tuple[Mistake, ...] = ()
    try:
        read_matrix(data, "m.yaml")
    except DeclarationError as error:
        mistakes = error.mistakes
    lines = data.decode("utf-8", "replace").count("\n") + data.count(b"\r") + 2
    for mistake in mistakes:
        assert 1 <= mistake.place.line <= lines
        assert mistake.place.column >= 1
        assert mistake.found
        assert mistake.allowed


CHARACTERS = "\n-:[]{},'\"&*!%|>?#\t\\\x85\u2028\ufeff\x00\U0001f600é "
SCRAPS = ["  ", "- ", ": ", "&a ", "*a ", "!t ", "|\n", ">\n", "? ", "<<: ", "---\n", "...\n", "schema: 1\n", "(?P<"]
WORDS = ["covered", "r0/eager", "prefix_lens", "extend", "1", "-1", "true", "null", "0x1", "1e9", ".nan", "9" * 30]
PIECES = st.one_of(st.sampled_from(CHARACTERS), st.sampled_from(SCRAPS), st.sampled_from(WORDS))


@given(data=st.binary(max_size=200))
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    _read_or_refuse(data)


@given(pieces=st.lists(PIECES, max_size=30))
@example(pieces=["? ", "- ", "\n"])
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_any_scraps_of_yaml_are_read_or_refused(pieces: list[str]) -> None:
    _read_or_refuse("".join(pieces).encode())


@given(
    at=st.floats(0, 1, exclude_max=True),
    cut=st.integers(0, 30),
    pieces=st.lists(PIECES, max_size=3),
)
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_any_edit_of_a_valid_file_is_read_or_refused(small: str, at: float, cut: int, pieces: list[str]) -> None:
    start = int(at * len(small))
    _read_or_refuse((small[:start] + "".join(pieces) + small[start + cut :]).encode())


def test_swapped_lines_are_read_or_refused(small: str) -> None:
    shuffler = random.Random(zlib.crc32(b"swapped lines"))
    for _ in range(50):
        lines = small.splitlines(keepends=True)
        a, b = shuffler.randrange(len(lines)), shuffler.randrange(len(lines))
        lines[a], lines[b] = lines[b], lines[a]
        _read_or_refuse("".join(lines).encode())
