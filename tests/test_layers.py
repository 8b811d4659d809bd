"""The import rules of the architecture hold, and would be noticed if they did not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grimp
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


def circles(package: str) -> list[list[str]]:
    """Modules that import each other, directly or by others; an import for types alone counts, unlike in contracts."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=False, cache_dir=None)
    behind = {module: graph.find_upstream_modules(module) for module in graph.modules}
    groups = {frozenset([m, *(n for n in behind[m] if m in behind[n])]) for m in graph.modules}
    return sorted(sorted(group) for group in groups if len(group) > 1)


@pytest.mark.parametrize("package", ["dsv4_matrix", "dsv4_reference", "dsv4_triton"])
def test_no_modules_import_each_other(package: str) -> None:
    assert circles(package) == []


def test_a_circle_of_types_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "round_about"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "one.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import round_about.two\n")
    (package / "two.py").write_text("import round_about.three\n")
    (package / "three.py").write_text("import round_about.one\n")
    (package / "four.py").write_text("import round_about.one\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert circles("round_about") == [["round_about.one", "round_about.three", "round_about.two"]]
