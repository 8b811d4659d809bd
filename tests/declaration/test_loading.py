"""What a valid declaration is read into, and which file is found when none is named."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

import dsv4_matrix
from dsv4_matrix.declaration import DeclarationError, Matrix, Place, State, find_matrix, load_matrix


def test_small_declaration_is_read_into_values(small: str, small_matrix: Matrix) -> None:
    assert small_matrix.sha256 == hashlib.sha256(small.encode()).hexdigest()
    assert [cell.id for cell in small_matrix.cells] == ["r0/eager", "r0/verify-cg", "r4/eager", "r4/verify-cg"]
    assert [cell.state for cell in small_matrix.cells] == [
        State.COVERED,
        State.COVERED,
        State.DEFERRED,
        State.BLOCKED,
    ]
    chain = small_matrix.cell("r0/verify-cg").variants[0]
    assert (chain.forward, chain.prefix_lens, chain.extend_lens) == ("target-verify", (64, 96), (3, 3))
    assert (chain.accept_lens, chain.replays, chain.heads, chain.sink) == ((1, 2), ((65,), (), (66,)), 64, "off")
    assert chain.place == Place("small.yaml", 13, 7)
    assert small_matrix.cell("r4/eager").place == Place("small.yaml", 21, 3)
    assert small_matrix.tolerances.budget.cosine == 1e-5


def test_cases_cover_variants_probes_and_refusals(small_matrix: Matrix) -> None:
    assert [(case.id, case.kind) for case in small_matrix.cases()] == [
        ("r0-eager-decode", "case"),
        ("r0-eager-extend", "case"),
        ("r0-verify-cg-chain", "case"),
        ("r4-eager-refused", "probe"),
        ("r4-verify-cg-refused", "probe"),
        ("refusal-page-size", "refusal"),
    ]


def test_order_of_cells_in_the_file_does_not_matter(small: str, small_matrix: Matrix) -> None:
    from dsv4_matrix.declaration import read_matrix

    line = "  r0/verify-cg: {state: covered, profiles: [chains]}\n"
    moved = small.replace(line, "").replace("cells:\n", f"cells:\n{line}")
    assert read_matrix(moved.encode(), "small.yaml").cells == small_matrix.cells


def test_profile_gives_an_eager_cell_its_variants_without_replays(own_matrix: Matrix) -> None:
    eager = {variant.name: variant for variant in own_matrix.cell("r0/verify-eager").variants}
    graph = {variant.name: variant for variant in own_matrix.cell("r0/verify-cg").variants}
    assert graph.keys() == eager.keys() - {"ragged", "every-acceptance"}
    assert not any(variant.replays or variant.bucket for variant in eager.values())
    assert all(variant.replays for variant in graph.values())


def test_places_are_relative_to_the_working_directory(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / "matrix.yaml"
    path.write_text(small.replace("schema: 1", "schema: 2"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DeclarationError, match=r"^sub/matrix\.yaml:1:9: "):
        load_matrix(path)


def test_repositorys_file_wins_over_the_packaged_one(tmp_path: Path, small: str) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "matrix.yaml").write_text(small, encoding="utf-8")
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    assert find_matrix(below) == tmp_path / "matrix.yaml"


def test_search_ends_at_the_repositorys_root(tmp_path: Path, small: str) -> None:
    (tmp_path / "matrix.yaml").write_text(small, encoding="utf-8")
    root = tmp_path / "other"
    (root / ".git").mkdir(parents=True)
    found = find_matrix(root)
    assert found != tmp_path / "matrix.yaml"
    assert found == Path(dsv4_matrix.__file__).parents[1] / "matrix.yaml"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the finder where a wheel would put it."""
    package = tmp_path / "site" / "dsv4_matrix"
    (package / "declaration").mkdir(parents=True)
    from dsv4_matrix.declaration import find

    copy = package / "declaration" / "find.py"
    shutil.copy(find.__file__, copy)
    monkeypatch.setattr(find, "__file__", str(copy))
    return package


def test_wheel_brings_its_own_file(installed: Path, tmp_path: Path) -> None:
    (installed / "matrix.yaml").write_text("", encoding="utf-8")
    (tmp_path / ".git").mkdir()
    assert find_matrix(tmp_path) == installed / "matrix.yaml"


def test_no_file_at_all_is_said(installed: Path, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    with pytest.raises(
        DeclarationError, match=r"no matrix.yaml here, above, or in the package; allowed: --matrix PATH"
    ):
        find_matrix(tmp_path)
