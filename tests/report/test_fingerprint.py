"""The fingerprint: the same in a checkout and in a wheel, moved by every source that decides a result, by no other."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from dsv4_matrix.report import fingerprint as module
from dsv4_matrix.report.fingerprint import SourcesMissingError, fingerprint

FILES = {
    "matrix.yaml": "cells",
    "dsv4_matrix/__init__.py": "",
    "dsv4_matrix/plugin.py": "plugin",
    "dsv4_matrix/cases/build.py": "build",
    "dsv4_matrix/modes/drive.py": "drive",
    "dsv4_matrix/judge/__init__.py": "judge",
    "dsv4_matrix/report/table.py": "table",
    "backends/fp_back/__init__.py": "",
    "backends/fp_back/deep/kernel.py": "kernel",
    "references/fp_ref/__init__.py": "reference",
    "docs/index.md": "docs",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def of(root: Path) -> str:
    return fingerprint(root / "matrix.yaml", root / "dsv4_matrix")


DECIDES = [
    "matrix.yaml",
    "dsv4_matrix/cases/build.py",
    "dsv4_matrix/modes/drive.py",
    "dsv4_matrix/judge/__init__.py",
    "backends/fp_back/deep/kernel.py",
    "references/fp_ref/__init__.py",
]


@pytest.mark.parametrize("name", sorted(FILES))
def test_moved_by_what_decides_a_result_and_by_nothing_else(checkout: Path, name: str) -> None:
    before = of(checkout)
    (checkout / name).write_text(FILES[name] + " changed")
    assert (of(checkout) != before) == (name in [*DECIDES, "backends/fp_back/__init__.py"])


def test_a_rename_and_a_move_of_bytes_between_files_count(checkout: Path) -> None:
    before = of(checkout)
    (checkout / "backends/fp_back/deep/kernel.py").rename(checkout / "backends/fp_back/deep/other.py")
    assert of(checkout) != before


def test_caches_and_hidden_files_do_not_count(checkout: Path) -> None:
    before = of(checkout)
    for name in ("__pycache__/kernel.cpython-311.pyc", ".kernel.py.swp", "kernel.pyc"):
        (checkout / "backends/fp_back" / name).parent.mkdir(exist_ok=True)
        (checkout / "backends/fp_back" / name).write_text("noise")
    assert of(checkout) == before


def test_installed_gives_the_same_value_as_a_checkout(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    shutil.copytree(checkout / "dsv4_matrix", site / "dsv4_matrix")
    shutil.copytree(checkout / "backends/fp_back", site / "fp_back")
    shutil.copytree(checkout / "references/fp_ref", site / "fp_ref")
    shutil.copy(checkout / "matrix.yaml", site / "dsv4_matrix/matrix.yaml")
    info = site / "fp_project-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fp-project\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[dsv4_matrix.backends]\nmine = fp_back.sub:Backend\n\n[dsv4_matrix.references]\nmine = fp_ref\n"
    )
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    monkeypatch.setattr(module, "DISTRIBUTION", "fp-project")
    assert fingerprint(site / "dsv4_matrix/matrix.yaml", site / "dsv4_matrix") == of(checkout)


def test_without_sources_there_is_no_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "matrix.yaml").write_text("")
    monkeypatch.setattr(module, "DISTRIBUTION", "no-such-project")
    with pytest.raises(SourcesMissingError, match="no package of backends/ found beside"):
        fingerprint(tmp_path / "matrix.yaml", tmp_path / "dsv4_matrix")


def test_report_needs_no_torch() -> None:
    import subprocess

    code = (
        "import sys, dsv4_matrix.report.evidence, dsv4_matrix.report.ledger, dsv4_matrix.report.telemetry, "
        "dsv4_matrix.report.transport; print(*sorted(name.partition('.')[0] for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "triton", "numpy"} & set(done.stdout.split()) == set()
