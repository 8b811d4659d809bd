"""Order of arrival: what it does to a report and to a sum that follow it, and that the canonical ones do not."""

from __future__ import annotations

import math
import random
from concurrent.futures import Future, as_completed
from zlib import crc32

from dsv4_matrix.report.canonical import dumps
from dsv4_matrix.report.result import Header, Outcome, Report, Result

HEADER = Header("m", "f", "b", "d", "t", "t")
RESULTS = tuple(Result(f"case-{at:02}", "r0/decode", "case", Outcome.PASSED, "", f"0.{at:02}") for at in range(24))


def arrivals(count=6):
    """The same results as several runs would hand them in."""
    for run in range(count):
        order = list(RESULTS)
        random.Random(crc32(f"run {run}".encode())).shuffle(order)
        yield order


def in_order_of_arrival(order):
    """A collector that appends, as one over ``as_completed`` does."""
    done = []
    for result in order:
        future: Future[Result] = Future()
        future.set_result(result)
        done += [future.result() for future in as_completed([future])]
    return "".join(f"{result.id} {result.margin}\n" for result in done)


def test_the_canonical_report_is_one_file_however_results_arrive():
    assert len({dumps(Report(HEADER, tuple(order))) for order in arrivals()}) == 1


def test_a_collector_in_order_of_arrival_is_not():
    assert len({in_order_of_arrival(order) for order in arrivals()}) > 1


def test_a_float_sum_in_order_of_arrival_is_not_one_number():
    values = [1e16, 1.0, -1e16]
    assert {sum(order) for order in (values, [1e16, -1e16, 1.0])} == {0.0, 1.0}
    assert {math.fsum(order) for order in (values, [1e16, -1e16, 1.0])} == {1.0}
