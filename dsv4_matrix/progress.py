"""What ``dsv4-matrix run`` shows while it works: one line that is rewritten on a terminal, a few lines elsewhere."""

from __future__ import annotations

from typing import TextIO

import pytest


class Progress:
    """A pytest plugin in place of pytest's own terminal report.

    Attributes:
        errors: what went wrong outside of cases: modules that do not import, internal errors.
        stopped: why the run was ended early, if it was.
    """

    def __init__(self, total: int, out: TextIO) -> None:
        self.errors: list[str] = []
        self.stopped = ""
        self._total = total
        self._out = out
        self._live = out.isatty()
        self._settled: set[str] = set()
        self._short = 0
        self._shown = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        if report.nodeid not in self._settled:
            self._settled.add(report.nodeid)
            self._short += not report.passed
        self._show(report.nodeid.partition("[")[2].rstrip("]"))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append(report.longreprtext)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if isinstance(excinfo.value, pytest.exit.Exception):
            self.stopped = str(excinfo.value)

    def pytest_internalerror(self, excrepr: object) -> None:
        self.errors.append(str(excrepr))

    def close(self) -> None:
        """End the live line, so that what follows stands on its own."""
        if self._live and self._shown:
            self._out.write("\r\x1b[K")
            self._out.flush()

    def _show(self, case_id: str) -> None:
        done = len(self._settled)
        text = f"{done}/{self._total} cases, {self._short} short"
        if self._live:
            self._out.write(f"\r\x1b[K{text}   {case_id}"[:110])
        elif done * 10 // self._total > self._shown * 10 // self._total or done == self._total:
            self._out.write(text + "\n")
        else:
            return
        self._shown = done
        self._out.flush()
