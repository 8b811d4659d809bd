"""The wheel holds what an installed user needs, and nothing generic at the top level of site-packages."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4_matrix.report.fingerprint import fingerprint

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_three_packages_and_their_data(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"dsv4_matrix", "dsv4_triton", "dsv4_reference"}
    assert {
        "dsv4_matrix/matrix.yaml",
        "dsv4_matrix/py.typed",
        "dsv4_matrix/suite/pytest.ini",
        "dsv4_matrix/suite/test_cells.py",
        "dsv4_triton/kernels.json",
    } <= names


@pytest.fixture
def installed(wheel: zipfile.ZipFile, tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Run code in an empty folder, in an interpreter that imports the packages from the unpacked wheel."""
    site, empty = tmp_path / "site", tmp_path / "empty"
    wheel.extractall(site)
    empty.mkdir()

    def call(code: str) -> subprocess.CompletedProcess[str]:
        code = f"import sys; sys.path.insert(0, {str(site)!r}); {code}"
        return subprocess.run([sys.executable, "-I", "-c", code], cwd=empty, capture_output=True, text=True)

    return call


def test_an_installed_wheel_has_the_fingerprint_of_the_checkout(
    installed: Callable[[str], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = installed(
        "from pathlib import Path; from dsv4_matrix.report import fingerprint as f; "
        "package = Path(f.__file__).parents[1]; print(package.parent, f.fingerprint(package / 'matrix.yaml'))"
    )
    assert done.stdout.split() == [str(tmp_path / "site"), fingerprint(ROOT / "matrix.yaml")], done.stderr


def test_an_installed_wheel_runs_the_matrix_from_an_empty_folder(
    installed: Callable[[str], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    cells = "r0-eager-decode-within-window,refusal-head-dim"
    done = installed(
        "from dsv4_matrix.cli import main; import dsv4_triton; assert dsv4_triton.__file__.startswith(sys.path[0]); "
        f"sys.exit(main(['run', '--cells', '{cells}', '-n', '0']))"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 selected cases passed" in done.stdout
    assert list((tmp_path / "empty").iterdir()) == []
