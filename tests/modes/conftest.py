import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import dsv4_reference
import pytest

from dsv4_matrix.cases.build import build_scenario
from dsv4_matrix.declaration import Case, Cell, Matrix, State, Variant, find_matrix, load_matrix
from dsv4_matrix.judge import judge
from dsv4_matrix.modes.drive import drive
from dsv4_matrix.modes.trace import Trace

TOY = Path(__file__).parents[1] / "meta" / "toy_backend" / "__init__.py"


@pytest.fixture(scope="session")
def toy() -> ModuleType:
    """tests/meta/toy_backend, whose folder is in no package and on no path."""
    name = "dsv4_matrix_tests_toy_backend"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, TOY)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def matrix() -> Matrix:
    return load_matrix(find_matrix())


@pytest.fixture(scope="session")
def make_case() -> Callable[..., Case]:
    """``make_case(ratio, mode, forward, prefix_lens, **variant)``: a case that no matrix declares."""

    def make(ratio: int, mode: str, forward: str, prefix_lens: tuple[int, ...], **given: Any) -> Case:
        variant = Variant(name="made", forward=forward, prefix_lens=prefix_lens, **given)
        return Case(f"r{ratio}-{mode}-made", "case", Cell(ratio, mode, State.COVERED, (variant,)), variant)

    return make


@pytest.fixture(scope="session")
def trace_of(matrix: Matrix) -> Callable[[Case, Any], Trace]:
    return lambda case, factory: drive(case, build_scenario(case, matrix, "cpu"), factory, "cpu")


@pytest.fixture(scope="session")
def outcome_of(matrix: Matrix) -> Callable[[Case, Any], str]:
    """``violated: first sentence``, or the judge's outcome."""

    def outcome(case: Case, factory: Any) -> str:
        scenario = build_scenario(case, matrix, "cpu")
        trace = drive(case, scenario, factory, "cpu")
        if trace.violations:
            return "violated: " + trace.violations[0]
        verdict = judge(
            case, scenario, trace.observations, dsv4_reference, matrix.tolerances, backend_name="toy", device="cpu"
        )
        return verdict.outcome

    return outcome
