"""What the backend declares about its bits is readable, and of architectures that it has."""

from __future__ import annotations

from dsv4_triton import determinism
from dsv4_triton.target import TARGETS

from dsv4_matrix.admission import admit, declared


def test_declaration():
    paths = declared(determinism)
    assert {path.name for path in paths} == {"coins", "chain-verify", "log-softmax", "seeded-sample"}
    for architecture in TARGETS:
        assert admit(paths, [path.name for path in paths], architecture) == paths
