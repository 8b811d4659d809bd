"""One hash over the sources that decide a result: equal in a checkout and in an installed wheel, free of git.

Evidence is current only for the sources it was recorded on. In the hash: backends, references, the harness parts that
build, drive and judge cases, and matrix.yaml. Not in it: plugin, CLI, report and docs, which cannot change a result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

DISTRIBUTION = "dsv4-matrix"

#: Parts of the harness that decide a result.
HARNESS = ("cases", "modes", "judge")
#: Entry point group of each import root in the repository.
ROOTS = {"backends": "dsv4_matrix.backends", "references": "dsv4_matrix.references"}


class SourcesMissingError(LookupError):
    """The sources of this project cannot be found, so nothing can be said about them."""


def fingerprint(matrix: Path, package: Path | None = None, also: Sequence[str] = ()) -> str:
    """sha256, in hex, over the sorted (path in the repository, bytes) of the sources and ``matrix``.

    Args:
        matrix: the declaration in use; it enters as ``matrix.yaml`` wherever it lies.
        package: folder of the ``dsv4_matrix`` package; by default the running one.
        also: more files and folders of that package.

    Raises:
        SourcesMissingError: no backend or reference of this project can be found.
    """
    package = package or Path(__file__).parents[1]
    files = {"matrix.yaml": matrix.read_bytes()}
    for part in (*HARNESS, *also):
        files.update(_files(package / part, f"dsv4_matrix/{part}"))
    for root, group in ROOTS.items():
        for folder in _packages(package, root, group):
            files.update(_files(folder, f"{root}/{folder.name}"))
    digest = hashlib.sha256()
    for path, data in sorted(files.items(), key=lambda item: item[0].encode()):
        digest.update(f"{path}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def _packages(package: Path, root: str, group: str) -> list[Path]:
    """Folders of the import packages of one root: beside the package in a checkout, else where they are installed."""
    beside = package.parent / root
    if beside.is_dir():
        found = [folder for folder in beside.iterdir() if (folder / "__init__.py").is_file()]
    else:
        found = list(_installed(group))
    if not found:
        raise SourcesMissingError(
            f"no package of {root}/ found beside {package} or installed by {DISTRIBUTION}; install the project"
        )
    return sorted(found)


def _installed(group: str) -> Iterator[Path]:
    try:
        points = distribution(DISTRIBUTION).entry_points
    except PackageNotFoundError:
        return
    for name in sorted({point.module.partition(".")[0] for point in points if point.group == group}):
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            yield Path(spec.origin).parent


def _files(folder: Path, prefix: str) -> dict[str, bytes]:
    """Bytes of every source below ``folder`` by its path in the repository; caches and hidden files left out."""
    if folder.is_file():
        return {prefix: folder.read_bytes()}
    return {
        f"{prefix}/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
        and path.suffix not in (".pyc", ".pyo")
        and not any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(folder).parts)
    }
