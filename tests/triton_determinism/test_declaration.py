"""What the backend declares about its bits is readable, and of architectures that it has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

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


def test_the_documented_promises_are_the_declared_ones():
    text = (Path(__file__).parents[2] / "docs" / "guarantees.md").read_text()
    rows = [line.split("|")[1:4] for line in text.splitlines() if line.startswith("| `")]
    told = {name: (level.strip(), where) for names, level, where in rows for name in re.findall(r"`([\w-]+)`", names)}
    for path in declared(determinism):
        level, where = told.pop(path.name)
        assert level == path.promise.value
        architectures = set(re.findall(r"`([\w-]+)`", where)) or set(TARGETS)
        assert architectures == set(path.architectures)
    assert not told


#: What would let timing, the order of arrival or the device's size into a sum: tuning, atomics, the number of SMs.
VARIANT = ("autotune", "heuristics", "atomic_", "multi_processor_count", "num_sms")


def variant_names(source):
    """Names and attributes in ``source`` that make a result depend on more than its inputs."""
    nodes = ast.walk(ast.parse(source))
    names = [n.id if isinstance(n, ast.Name) else n.attr for n in nodes if isinstance(n, ast.Name | ast.Attribute)]
    return sorted({name for name in names if name.lower().startswith(VARIANT)})


def test_no_kernel_is_tuned_by_timing_or_adds_in_order_of_arrival():
    """A persistent grid may know how many SMs there are: each row is still summed by one program, in one order."""
    folder = Path(determinism.__file__).parent
    texts = {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.py"))}
    assert any(name.startswith("hopper/") for name in texts)
    found = {name: names for name, text in texts.items() if (names := variant_names(text))}
    assert {name: names for name, names in found.items() if not name.startswith("hopper/")} == {}
    persistent = {names for found_names in found.values() for names in found_names}
    assert persistent <= {"multi_processor_count", "NUM_SMS", "num_sms"}


@pytest.mark.parametrize(
    "line",
    [
        "@triton.autotune(configs=[], key=['rows'])\ndef f(): pass",
        "tl.atomic_add(out, x)",
        "splits = torch.cuda.get_device_properties(0).multi_processor_count // rows",
    ],
)
def test_what_would_do_so_is_seen(line):
    assert variant_names(line)
