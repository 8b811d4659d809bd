"""xdist scheduler with the plan made in advance: whole cells to workers, the same map in every run, nothing stolen.

xdist's own ``--dist loadgroup`` scatters groups on pytest 9.2, and its other modes hand out tests by who is free first.
Here a worker's list is known before it starts. When it dies, its replacement gets what it had not begun; the test that
it was running is given up, never run again.

This is the one module that depends on how xdist 3 drives a scheduler; the tests measure what workers really ran.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from xdist.remote import Producer
from xdist.report import report_collection_diff
from xdist.workermanage import WorkerController, parse_tx_spec_config

from dsv4_matrix.shard.workers import place_of

#: Node ids of all tests, and the number of workers, to the indices that each worker runs, in its order.
Planner = Callable[[Sequence[str], int], Sequence[Sequence[int]]]

#: Tests a worker has in hand: the running one, the next, which it must know before it begins, and one to not wait.
IN_HAND = 3
#: A place whose workers die this often in a row without beginning a test is given up.
FRUITLESS_DEATHS = 2


@dataclass
class Place:
    """The place of one worker, taken over by its replacements.

    Attributes:
        pending: indices of tests that have not ended, in planned order.
        sent: how many of them the worker has in hand.
        begun: index of the test that is running, if one is.
        node: the worker that serves the place now.
        productive: whether that worker has begun any test.
        fruitless: deaths in a row of workers that had begun none.
        given_up: what is pending is run by nobody.
    """

    pending: list[int] = field(default_factory=list)
    sent: int = 0
    begun: int | None = None
    node: WorkerController | None = None
    productive: bool = False
    fruitless: int = 0
    given_up: bool = False


class PinnedScheduling:
    """Satisfies ``xdist.scheduler.Scheduling``. Register it as a plugin too: that is how it learns what has begun."""

    def __init__(self, config: pytest.Config, log: Producer, planner: Planner) -> None:
        self.config = config
        self.log = log.pinnedsched
        self._planner = planner
        self._places = [Place() for _ in parse_tx_spec_config(config)]
        self._nodes: dict[WorkerController, Place] = {}
        self._died: set[WorkerController] = set()
        self._collected: dict[WorkerController, list[str]] = {}
        self._collection: list[str] | None = None
        self._place_of_test: dict[str, tuple[Place, int]] = {}

    @property
    def nodes(self) -> list[WorkerController]:
        return list(self._nodes)

    @property
    def collection_is_completed(self) -> bool:
        expected = sum(not place.given_up for place in self._places)
        return self._collection is not None or len(self._collected) >= expected

    @property
    def tests_finished(self) -> bool:
        return self._collection is not None and not self.has_pending

    @property
    def has_pending(self) -> bool:
        return any(place.pending for place in self._places if not place.given_up)

    def add_node(self, node: WorkerController) -> None:
        self._nodes[node] = self._place(node)

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        self._collected[node] = list(collection)

    def schedule(self) -> None:
        """Bring every worker that has collected to its place, and let it begin."""
        if self._collection is None:
            self._plan()
        for node, place in self._nodes.items():
            if place.node is node or node not in self._collected:
                continue
            place.node, place.sent, place.productive = node, 0, False
            place.given_up = place.given_up or self._differs(node)
            self._feed(place)

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        place = self._nodes[node]
        place.pending.remove(item_index)
        place.sent -= 1
        place.begun = None
        self._feed(place)

    def mark_test_pending(self, item: str) -> None:
        raise NotImplementedError(f"{item} took its worker down; it is not run a second time")

    def remove_pending_tests_from_node(self, node: WorkerController, indices: Sequence[int]) -> None:
        raise NotImplementedError("tests are pinned to their worker and are never taken from it")

    def remove_node(self, node: WorkerController) -> str | None:
        """The test that ``node`` was running when it died, if it was; KeyError if it died before it was ready."""
        place = self._place(node)
        self._collected.pop(node, None)
        ready = self._nodes.pop(node, None) is not None
        served = place.node is node and (place.productive or not place.pending)
        crashed, place.node, place.begun = place.begun, None, None
        if crashed is not None:
            assert self._collection is not None
            place.pending.remove(crashed)
            return self._collection[crashed]
        if node in self._died and not served:
            self._fruitless_death(place)
        if not ready:
            raise KeyError(node)
        return None

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if nodeid in self._place_of_test:
            place, index = self._place_of_test[nodeid]
            place.begun, place.productive, place.fruitless = index, True, 0

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: WorkerController, error: object | None) -> None:
        if error is not None:
            self._died.add(node)

    def _place(self, node: WorkerController) -> Place:
        return self._places[place_of(node.gateway.spec.env)]

    def _feed(self, place: Place) -> None:
        """Hand the place's worker what it may have in hand; tell it to end when it has the last one."""
        node = place.node
        if node is None or node.shutting_down:
            return
        runnable = [] if place.given_up else place.pending
        if more := runnable[place.sent : IN_HAND]:
            try:
                node.send_runtest_some(more)
            except OSError:
                return  # it has just died; the event that says so is on its way
            place.sent += len(more)
        if place.sent >= len(runnable):
            node.shutdown()

    def _fruitless_death(self, place: Place) -> None:
        place.fruitless += 1
        place.given_up = place.given_up or place.fruitless >= FRUITLESS_DEATHS
        if not place.given_up:
            return
        if all(other.given_up for other in self._places) or self.tests_finished:
            # Nothing is left to run, but xdist would go on replacing the workers of this place.
            pytest.exit(
                "a worker died again before it began a test, and so did its replacement; see its output above, or run "
                "with -n 0 to meet the error itself",
                returncode=1,
            )
        if self._collection is None and self._collected and self.collection_is_completed:
            self.schedule()  # the other workers were waiting for this place to collect

    def _plan(self) -> None:
        collection = next(iter(self._collected.values()))
        lists = self._planner(collection, len(self._places))
        planned = sorted(index for indices in lists for index in indices)
        if planned != list(range(len(collection))) or len(lists) != len(self._places):
            raise ValueError(f"a plan for {len(self._places)} workers must hold each of {len(collection)} tests once")
        for place, indices in zip(self._places, lists, strict=True):
            place.pending = list(indices)
            self._place_of_test.update({collection[index]: (place, index) for index in indices})
        self._collection = collection

    def _differs(self, node: WorkerController) -> bool:
        """Whether ``node`` collected other tests than the plan is over; reported as a failed collection."""
        assert self._collection is not None
        message = report_collection_diff(self._collection, self._collected[node], "the plan", node.gateway.id)
        if message is None:
            return False
        report = pytest.CollectReport(nodeid=node.gateway.id, outcome="failed", longrepr=message, result=[])
        self.config.hook.pytest_collectreport(report=report)
        return True
