"""Warnings as errors, as suites of others have them: what numpy says of poison in interpreted kernels is none."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from dsv4_matrix import execution
from dsv4_matrix.context import Context, Options
from dsv4_matrix.declaration.model import Case
from dsv4_matrix.execution import Execution, Setup, execute, on_screen
from dsv4_matrix.report.result import Outcome


@pytest.fixture(scope="module")
def setup() -> Setup:
    return Context(Options.of_command()).setup


@pytest.fixture
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.usefixtures("warnings_are_errors")
@pytest.mark.parametrize(
    ("module", "category", "outcome"),
    [
        ("triton.runtime.interpreter", RuntimeWarning, Outcome.PASSED),
        ("triton.runtime.interpreter", DeprecationWarning, Outcome.ERROR),
        ("mykernels.attention", RuntimeWarning, Outcome.ERROR),
    ],
)
def test_only_poison_in_the_interpreter_is_quiet(
    module: str, category: type[Warning], outcome: Outcome, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warns(case: Case, setup: Setup) -> Execution:
        warnings.warn_explicit("invalid value encountered in subtract", category, "file.py", 1, module=module)
        return on_screen(case, "mine", "here", Outcome.PASSED, "")

    monkeypatch.setattr(execution, "_case", warns)
    before: list[Any] = list(warnings.filters)
    case = next(case for case in setup.matrix.cases() if case.kind == "case")
    assert execute(case, setup).result.outcome is outcome
    assert list(warnings.filters) == before, "the suite's own filters are left as they are"
