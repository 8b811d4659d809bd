"""Tiny projects under the pinned scheduler: every test writes down where it ran."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

CONFTEST = '''
import os
from pathlib import Path

import pytest

from dsv4_matrix.shard.plan import Unit, divide
from dsv4_matrix.shard.scheduler import PinnedScheduling
from dsv4_matrix.shard.workers import PLACE, prepare

LOG = Path(__file__).with_name("ran.txt")


def plan(nodeids, workers):
    """Tests of one letter stay together; ``test[a-2]`` is of the letter a."""
    units = {}
    for index, nodeid in enumerate(nodeids):
        units.setdefault(nodeid.partition("[")[2][0], []).append(index)
    places = divide([Unit(name, len(members), ()) for name, members in units.items()], workers)
    return [[index for unit in place for index in units[unit.id]] for place in places]


def pytest_xdist_setupnodes(specs):
    prepare(specs, (), os.environ, Path(__file__).parent)


def pytest_xdist_make_scheduler(config, log):
    scheduler = PinnedScheduling(config, log, plan)
    config.pluginmanager.register(scheduler)
    return scheduler


@pytest.fixture(autouse=True)
def where(request):
    with LOG.open("a") as log:
        log.write(f"{os.environ.get(PLACE)} {os.environ.get('PYTEST_XDIST_WORKER')} {request.node.name}\\n")
'''

TESTS = """
import os
import signal
import time

import pytest

FAULTS = __import__("json").loads(os.environ.get("FAULTS", "{}"))


@pytest.mark.parametrize("name", __import__("json").loads(os.environ["NAMES"]))
def test(name):
    fault = FAULTS.get(name)
    if fault == "exit":
        os._exit(3)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "segfault":
        import ctypes

        ctypes.string_at(0)
    if fault == "fail":
        raise AssertionError(name)
"""


class Project:
    """Runs tests of these names under the pinned scheduler and reads back who ran what."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        pytester.makeconftest(CONFTEST)
        pytester.makepyfile(test_tiny=TESTS)
        pytester.makeini("[pytest]\naddopts = -p xdist -p no:cacheprovider -p no:faulthandler\n")
        self.pytester = pytester
        self._monkeypatch = monkeypatch

    def run(
        self, names: Sequence[str], *arguments: str, faults: dict[str, str] | None = None
    ) -> tuple[pytest.RunResult, dict[str, list[tuple[str, str]]]]:
        """The run, and for each test the (place, worker) of every time that it ran."""
        self._monkeypatch.setenv("NAMES", json.dumps(list(names)))
        self._monkeypatch.setenv("FAULTS", json.dumps(faults or {}))
        log = self.pytester.path / "ran.txt"
        log.write_text("")
        result = self.pytester.runpytest_subprocess(*arguments, timeout=120)
        ran: dict[str, list[tuple[str, str]]] = {}
        for line in log.read_text().splitlines():
            place, worker, name = line.split()
            ran.setdefault(name.removeprefix("test[").removesuffix("]"), []).append((place, worker))
        return result, ran


@pytest.fixture
def tiny(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # workers start in half the time
    return Project(pytester, monkeypatch)
