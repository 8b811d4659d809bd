"""The import rules of the architecture hold, and would be noticed if they did not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run([sys.executable, "-c", code, "--no-cache"], cwd=folder, capture_output=True, text=True)


def test_import_contracts_hold() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("references/dsv4_reference/visibility.py", "import dsv4_triton", "know neither each other"),
        ("backends/dsv4_triton/geometry.py", "import dsv4_matrix.protocol", "do not import the harness"),
        ("dsv4_matrix/loading.py", "import dsv4_triton", "no backend and no reference by name"),
        ("dsv4_matrix/report/canonical.py", "import torch", "need no torch"),
        ("dsv4_matrix/declaration/model.py", "import dsv4_matrix.judge", "One direction through the harness"),
    ],
)
def test_a_breach_is_noticed(tmp_path: Path, module: str, line: str, contract: str) -> None:
    for package in ("dsv4_matrix", "backends/dsv4_triton", "references/dsv4_reference"):
        for source in (ROOT / package).rglob("*.py"):
            copy = tmp_path / Path(package).name / source.relative_to(ROOT / package)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source.read_bytes())
    breached = tmp_path / Path(module).relative_to(Path(module).parts[0]) if "/dsv4_" in module else tmp_path / module
    breached.write_text(breached.read_text() + f"\n{line}\n")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stderr
    broken = [line for line in done.stdout.splitlines() if line.endswith("BROKEN")]
    assert any(contract in line for line in broken), done.stdout
