"""The generated cells of matrix.yaml for the backend that pyproject.toml names, by the packaged test."""

from __future__ import annotations

from dsv4_matrix.suite.test_cells import test_cell

__all__ = ["test_cell"]
