"""What the backend declares about its bits is readable, and of architectures that it has."""

from __future__ import annotations

import pytest
from dsv4_triton import DSV4TritonBackend, determinism
from dsv4_triton.target import TARGETS

from dsv4_matrix.admission import NotAdmittedError, admit, declared
from dsv4_matrix.report.bits import Level


def test_declaration():
    paths = declared(determinism)
    attention = {path.name for path in paths if path.name in ("attention", "sparse-prefill")}
    everywhere = [path for path in paths if path.name not in attention]
    assert {path.name for path in everywhere} == {"coins", "chain-verify", "log-softmax", "seeded-sample"}
    for architecture in TARGETS:
        assert admit(paths, [path.name for path in everywhere], architecture) == tuple(everywhere)


@pytest.mark.parametrize("path", ["attention", "sparse-prefill"])
def test_attention_is_declared_where_the_gate_has_run(path):
    paths = declared(DSV4TritonBackend)
    assert admit(paths, [path], "interpreter")[0].unsupported(Level.GRAPH) == ""
    with pytest.raises(NotAdmittedError, match="not on sm80"):
        admit(paths, [path], "sm80")
