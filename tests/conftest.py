"""Before any test module is imported: Triton's interpreter where there is no GPU, and one thread for CPU sums."""

from __future__ import annotations

from hypothesis import settings

from dsv4_matrix.machine import find_machine

find_machine()

# Property tests draw the same examples in every run; a failing one prints its own reproduction.
settings.register_profile("repository", derandomize=True, deadline=None, database=None)
settings.load_profile("repository")
