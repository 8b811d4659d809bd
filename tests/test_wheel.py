"""The wheel holds what an installed user needs, and nothing generic at the top level of site-packages."""

from __future__ import annotations

import subprocess
import sys
import zipfile
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
    } <= names


def test_an_installed_wheel_has_the_fingerprint_of_the_checkout(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = (
        "from pathlib import Path; from dsv4_matrix.report import fingerprint as f; "
        "package = Path(f.__file__).parents[1]; print(package.parent, f.fingerprint(package / 'matrix.yaml'))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [str(tmp_path), fingerprint(ROOT / "matrix.yaml")]
