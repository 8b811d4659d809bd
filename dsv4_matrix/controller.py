"""The controller's half of the plugin: gathers results from this process or from xdist workers, writes the report."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from dsv4_matrix.context import BadInputError, Context
from dsv4_matrix.selection import cases_of
from dsv4_matrix.shard.notes import read_found

if TYPE_CHECKING:
    from dsv4_matrix.report.ledger import Ledger
    from dsv4_matrix.report.result import Result
    from dsv4_matrix.report.telemetry import Telemetry

#: pytest-timeout fails a hung test with these words; its outcome is ``timeout``, not ``error``.
_TIMEOUT = "from pytest-timeout"
#: Phase that xdist gives to the report of a test whose worker died.
_CRASHED = "???"


#: Exit states of a session that came to its end.
_RAN = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


class Controller:
    """Registered as a plugin of its own in every process that is not an xdist worker."""

    def __init__(self, config: pytest.Config, context: Context) -> None:
        self._config = config
        self._context = context
        self._ledger: Ledger | None = None
        self._case_of: dict[str, str] = {}  # case id of each node id
        self._telemetry: dict[str, Telemetry] = {}
        self._began = time.time()  # the clock of a test report
        self._problems: list[str] = []
        self._running: dict[str, None] = {}  # node ids of tests that began and did not end, in that order
        self.interrupted = ""  #: in which cases, if it was and some ran

    @property
    def ledger(self) -> Ledger | None:
        """Results so far; None as long as no case was collected."""
        return self._ledger

    @property
    def messages(self) -> dict[str, str]:
        """What a person reads about each case that did not pass, by id."""
        return {entry.id: entry.message for entry in self._telemetry.values() if entry.message}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self._config.pluginmanager.has_plugin("dsession"):
            return  # under xdist this process collects nothing; its workers tell
        self._plan(cases_of(session.items))
        if not self._case_of and self._context.options.explicit and not session.testsfailed:
            raise pytest.UsageError(self._nothing())

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        if self._case_of or not self._context.options.named:
            return
        cases = [case.id for case in self._context.matrix.cases()]
        self._plan((case_id, nodeid) for nodeid, case_id in cases_of_worker(node, ids, cases).items())

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Whether it came from the keyboard or from a backend: under xdist, where it comes from is not told."""
        ran = [self._case_of[nodeid] for nodeid in self._running if nodeid in self._case_of]
        if ran and not isinstance(excinfo.value, pytest.exit.Exception):
            self.interrupted = f"interrupted in {'case' if len(ran) == 1 else 'cases'} {', '.join(sorted(ran))}"
            self._problems.append(self.interrupted)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        case_id = self._case_of.get(report.nodeid)
        if case_id is None or self._ledger is None:
            return
        result = self._result(case_id, report)
        if result is None:
            return
        from dsv4_matrix.report.transport import MESSAGE

        message = str(dict(report.user_properties).get(MESSAGE, ""))
        if report.failed and not message:
            message = f"{case_id}: {result.outcome}, {result.reason}\n{report.longreprtext}"
        self._note(case_id, report, message)
        if report.when == "teardown":  # a pass that broke its teardown is not a pass
            self._ledger.results.pop(case_id, None)
        self._ledger.record(result)

    def _result(self, case_id: str, report: pytest.TestReport) -> Result | None:
        """The result that ``report`` settles, or None if its phase settles nothing."""
        from dsv4_matrix.report.result import Outcome, Result, without_machine
        from dsv4_matrix.report.transport import from_properties

        assert self._ledger is not None
        case = self._ledger.cases[case_id]

        def made(outcome: Outcome, reason: str) -> Result:
            return Result(case_id, case.cell_id, case.kind, outcome, without_machine(reason))

        crash = getattr(report.longrepr, "reprcrash", None)
        told = crash.message if crash is not None else report.longreprtext.strip()
        if report.when == _CRASHED:
            return from_properties(report.user_properties) or made(Outcome.LOST, "its worker died while the case ran")
        if report.when == "call":
            if (result := from_properties(report.user_properties)) is not None:
                return result if report.passed or result.outcome != Outcome.PASSED else made(Outcome.ERROR, told)
            if report.failed:
                return made(Outcome.TIMEOUT if _TIMEOUT in report.longreprtext else Outcome.ERROR, told)
            why = "its test was skipped" if report.skipped else "its test never called matrix_case.execute()"
            return made(Outcome.NOT_RUN, why)
        if report.failed:
            return made(Outcome.ERROR, f"{report.when}: {told}")
        if report.skipped:
            return made(Outcome.NOT_RUN, "its test was skipped")
        return None

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self._ledger is None or self._config.getoption("collectonly", False):
            return
        if not self._case_of and self._context.options.explicit and exitstatus in _RAN:
            self._problems.append(self._nothing())
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
            return
        unproven = [r.id for r in self._ledger.complete() if r.id in self._ledger.planned and r.outcome != "passed"]
        if unproven and session.exitstatus == pytest.ExitCode.OK:
            self._problems.append(f"planned but not passed: {', '.join(unproven)}")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self._write_report(session)

    def _write_report(self, session: pytest.Session) -> None:
        path = self._context.options.report
        if path is None or self._ledger is None:
            return
        from dsv4_matrix.report import canonical, telemetry
        from dsv4_matrix.report.result import Report

        try:
            canonical.write(Report(self._context.header(), self._ledger.complete()), path)
            telemetry.write(self._telemetry.values(), telemetry.telemetry_path(path))
        except (BadInputError, canonical.ReportError) as error:
            self._problems.append(str(error))
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        collected_only = self._config.getoption("collectonly", False)
        if self._ledger is None or collected_only or not (self._case_of or self._problems):
            return
        counts = Counter(result.outcome.value for result in self._ledger.complete())
        terminalreporter.write_sep("-", "dsv4-matrix")
        terminalreporter.write_line(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
        for problem in self._problems:
            terminalreporter.write_line(f"ERROR: {problem}", red=True)

    def _plan(self, found: Iterable[tuple[str, str]]) -> None:
        pairs = list(found)
        if self._ledger is None and (pairs or self._context.options.explicit):
            self._ledger = self._context.ledger()
        if self._ledger is None:
            return
        first: dict[str, str] = {}
        for case_id, nodeid in pairs:
            if case_id in first:
                raise pytest.UsageError(
                    f"case {case_id} is generated by two tests, {first[case_id]} and {nodeid}: "
                    f"a report holds one result a case; run one of them"
                )
            first[case_id] = nodeid
        self._case_of = {nodeid: case_id for case_id, nodeid in pairs}
        self._ledger.planned = set(first)

    def _nothing(self) -> str:
        return (
            "zero cases were collected, which proves nothing: no collected test asks for the fixture matrix_case, or "
            "all of them were deselected; 'dsv4-matrix run' brings its own tests"
        )

    def _note(self, case_id: str, report: pytest.TestReport, message: str) -> None:
        from dsv4_matrix.report.telemetry import Telemetry
        from dsv4_matrix.report.transport import spent_in

        node = getattr(report, "node", None)
        worker = node.gateway.id if node is not None else "main"
        started = round(max(report.start - self._began, 0.0), 6)  # xdist's report of a dead worker's test has none
        spent = spent_in(report.user_properties)
        self._telemetry[case_id] = Telemetry(case_id, report.duration, worker, platform.node(), message, started, spent)


def cases_of_worker(node: Any, nodeids: Sequence[str], cases: Sequence[str]) -> Mapping[str, str]:
    """The case that each test of an xdist worker runs, by node id: as it left it, else as node ids suggest."""
    if (told := read_found(node)) is not None:
        return told.cases
    found = {nodeid: case_in(nodeid, cases) for nodeid in nodeids if "[" in nodeid}
    return {nodeid: case_id for nodeid, case_id in found.items() if case_id}


def case_in(nodeid: str, ids: Sequence[str]) -> str | None:
    """The case that a test's node id runs: the whole bracket, or with parameters of the test's own around it."""
    bracket = nodeid[nodeid.index("[") + 1 : -1]
    if bracket in ids:
        return bracket
    around = [i for i in ids if bracket.startswith(f"{i}-") or bracket.endswith(f"-{i}") or f"-{i}-" in bracket]
    return max(around, key=len, default=None)
