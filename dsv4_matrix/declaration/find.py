"""Which matrix.yaml stands when none is named: the repository's own, else the one that the package brought along."""

from __future__ import annotations

from pathlib import Path

from dsv4_matrix.declaration.mistakes import DeclarationError, Mistake
from dsv4_matrix.declaration.model import Place

NAME = "matrix.yaml"


def find_matrix(start: Path | None = None) -> Path:
    """``matrix.yaml`` in ``start`` (default: the working directory) or above, up to the repository's root.

    The search ends at the directory that holds ``.git``, so that a file of another project further up is not taken.
    Without one there, the packaged file; in a checkout that is the file beside the package.

    Raises:
        DeclarationError: neither is there.
    """
    directory = (start or Path.cwd()).resolve()
    for candidate in (directory, *directory.parents):
        if (candidate / NAME).is_file():
            return candidate / NAME
        if (candidate / ".git").exists():
            break
    package = Path(__file__).resolve().parent.parent
    for packaged in (package / NAME, package.parent / NAME):
        if packaged.is_file():
            return packaged
    mistake = Mistake(Place(str(directory), 1, 1), f"no {NAME} here, above, or in the package", "--matrix PATH")
    raise DeclarationError((mistake,))
