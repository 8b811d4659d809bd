"""Reports over the real declaration, as a GPU or CPU run would have left them, and what to change in them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from dsv4_matrix.declaration import find_matrix, load_matrix
from dsv4_matrix.declaration.model import Matrix
from dsv4_matrix.report.result import Header, Outcome, Report, Result, format_margin
from dsv4_matrix.shard.plan import Shard, cases_of_shard

ROOT = Path(__file__).parents[2]

#: ``make(device, shard=…, change=…)``: the report of one run; ``change`` gives fields of some results by case id.
Maker = Callable[..., Report]


@pytest.fixture(scope="session")
def matrix() -> Matrix:
    return load_matrix(find_matrix(ROOT))


@pytest.fixture(scope="session")
def case_id(matrix: Matrix) -> str:
    """Any case that runs everywhere."""
    cell = matrix.cell("r4/cg-decode")
    return next(case.id for case in matrix.cases("cpu") if case.cell_id == cell.id and case.kind == "case")


@pytest.fixture(scope="session")
def make(matrix: Matrix) -> Maker:
    def made(device: str = "gpu", shard: str = "1/1", change: dict[str, dict[str, object]] | None = None) -> Report:
        model = "CPU interpreter" if device == "cpu" else "Test GPU"
        header = Header(matrix.sha256, "f" * 64, "triton", model, "2.13.0", "3.7.1")
        here = matrix.cases(device)
        mine = {case.id for case in cases_of_shard(here, device, Shard(*map(int, shard.split("/"))))}
        assert (change or {}).keys() <= {case.id for case in matrix.cases()}
        results = []
        for case in matrix.cases():
            result = Result(case.id, case.cell_id, case.kind, Outcome.PASSED)
            if case.kind == "case":
                margin = format_margin(0.05 + crc32(case.id.encode()) % 90 / 100)
                result = replace(result, margin=margin, captures=int("cg" in case.id), replays=3 * ("cg" in case.id))
            if case not in here:
                result = Result(case.id, case.cell_id, case.kind, Outcome.NOT_RUN, "declared for gpu only")
            elif case.id not in mine:
                result = Result(case.id, case.cell_id, case.kind, Outcome.NOT_RUN, "in another shard")
            results.append(replace(result, **(change or {}).get(case.id, {})))  # type: ignore[arg-type]
        return Report(header, tuple(results))

    return made


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A tab of a headless Chromium. Without one the test is skipped; with DSV4_MATRIX_REQUIRE_BROWSER=1 it fails."""
    spec = importlib.util.spec_from_file_location("browser", Path(__file__).with_name("browser.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if (binary := module.find_chromium()) is None:
        how = "no Chromium found; install it (Debian: apt-get install chromium) or set CHROMIUM to its path"
        if os.environ.get("DSV4_MATRIX_REQUIRE_BROWSER") == "1":
            pytest.fail(how)
        pytest.skip(how)
    with module.Browser(binary) as tab:
        yield tab
