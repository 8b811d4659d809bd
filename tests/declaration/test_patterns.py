"""Patterns of probes: refused where a message that names nothing fits them, or where a long one would hang the run."""

from __future__ import annotations

import re
from importlib import import_module

import pytest

from dsv4_matrix.declaration import Matrix
from dsv4_matrix.declaration.patterns import ACCIDENTS, fault_of


@pytest.mark.parametrize(
    "pattern",
    [
        "(?i)swa.only",
        "(?i)top.?k",
        "bf16|bfloat16",
        r"\bq\b.*(bf16|bfloat16)",
        r"(?i)req_to_token|context|\b25[67]\b",
        r"head_dim\s*=\s*[0-9]{1,4}",
        r"(?=.*page)(?!swa).*size",
        "(?>pages?) of 256",
        r"(swa)?(?(1)_page_size|page_size)",
        "(?:page_size ){40}",
    ],
)
def test_a_pattern_that_names_is_taken(pattern: str) -> None:
    assert fault_of(pattern) is None


@pytest.mark.parametrize(
    "pattern",
    [
        "(?i).*",
        "...",
        r"\w+",
        "[a-z]{9}",
        "(page_size)?",
        "(?:page_size)*",
        "page_size|..|head_dim",
        "a.*b.*c",
        "p.a.g.e",
        r"\.\.\.",
        "a|e|i",
        "[0123456789]{3}",
        "[^p][^a][^g][^e]",
        "(?!page_size)",
        "(x)?(?(1)page_size)",
        r"(a)\1\1",
    ],
)
def test_a_pattern_that_spells_nothing_out_is_refused(pattern: str) -> None:
    fault = fault_of(pattern)
    assert fault is not None
    assert fault[0].startswith("spells out")


@pytest.mark.parametrize(
    "pattern",
    [
        "page_size (a+)+$",
        "page_size (a*)*",
        "page_size (?:a|a)+",
        "page_size (?:bf16|bfloat16){1,40}x",
        "page_size (a?){30}",
        "page_size " + "a?" * 30,
        "page_size (?:(?:a+?)+?)",
        "page_size (?=(a+)+$)",
        "page_size (?>(?:a+)+)$",
        "page_size .*.*.*",
        "page_size " + "(?:a|a)" * 25,
    ],
)
def test_a_pattern_that_can_hang_is_refused_without_trying_it(pattern: str) -> None:
    fault = fault_of(pattern)
    assert fault is not None
    assert fault[0].endswith("ways")


@pytest.mark.parametrize("pattern", ["expected", "match", "(?i)cuda", "implemented", "invalid .*base", "the value"])
def test_a_pattern_that_an_ordinary_bug_fits_is_refused(pattern: str) -> None:
    fault = fault_of(pattern)
    assert fault is not None
    assert fault[0].startswith("also matches")


def test_accidents_are_short_and_name_nothing_of_this_repository(own_matrix: Matrix) -> None:
    assert max(map(len, ACCIDENTS)) <= 100
    patterns = [case.probe.match for case in own_matrix.cases() if case.probe]
    assert len(patterns) > 30
    assert not [(pattern, text) for pattern in patterns for text in ACCIDENTS if re.search(pattern, text)]


def test_the_private_parser_has_the_shape_that_is_walked() -> None:
    """Another Python may rename an operation; a walk that does not know it would judge patterns wrongly."""
    every = r"a.[a-z][^a]\d^(b)(?:c|dd)e*f??g*+(?>h)(?=i)(?!j)(b)?(?(2)k|l)\1[^m]"
    names: set[str] = set()

    def walk(tree: object) -> None:
        if isinstance(tree, tuple | list) or hasattr(tree, "data"):
            for part in tree:  # type: ignore[union-attr]
                walk(part)
        elif hasattr(tree, "name"):
            names.add(tree.name)

    walk(import_module("re._parser").parse(every))
    assert names >= {
        *("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT", "SUBPATTERN", "BRANCH", "ATOMIC_GROUP", "ASSERT", "ASSERT_NOT"),
        *("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT", "GROUPREF", "GROUPREF_EXISTS"),
    }
