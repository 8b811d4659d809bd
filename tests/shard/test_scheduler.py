"""What workers really ran: groups held together, the same map each time, and deaths that cost one test each."""

from __future__ import annotations

from typing import Any

import pytest

NAMES = [f"{letter}-{number}" for letter in "abcde" for number in range(4)]


def places(ran: dict[str, list[tuple[str, str]]]) -> dict[str, str]:
    """Place of each test; fails if one ran twice."""
    assert all(len(times) == 1 for times in ran.values()), ran
    return {name: times[0][0] for name, times in ran.items()}


@pytest.mark.parametrize("workers", [2, 4])
def test_groups_are_held_together_and_spread(tiny: Any, workers: int) -> None:
    result, ran = tiny.run(NAMES, f"-n{workers}")
    result.assert_outcomes(passed=len(NAMES))
    by_letter = {letter: {place for name, place in places(ran).items() if name[0] == letter} for letter in "abcde"}
    assert all(len(found) == 1 for found in by_letter.values())
    assert {place for found in by_letter.values() for place in found} == {str(k) for k in range(workers)}


def test_loadgroup_of_xdist_would_not_do(tiny: Any) -> None:
    """The reason for a scheduler of our own. If this starts to fail, xdist has been mended, and ours can be weighed."""
    tiny.pytester.makeconftest(
        (tiny.pytester.path / "conftest.py").read_text().partition("def pytest_xdist_make_scheduler")[0]
        + """
def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.xdist_group(item.callspec.params["name"][0]))

@pytest.fixture(autouse=True)
def where(request):
    with LOG.open("a") as log:
        log.write(f"{os.environ.get(PLACE)} {os.environ.get('PYTEST_XDIST_WORKER')} {request.node.name}\\n")
"""
    )
    _, ran = tiny.run(NAMES, "-n2", "--dist=loadgroup")
    spread = [
        len({place for name, times in ran.items() if name[0] == letter for place, _ in times}) for letter in "abcde"
    ]
    assert max(spread) == 2


def test_the_map_is_the_same_in_every_run(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = []
    for seed in ("0", "random"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        maps.append(places(tiny.run(NAMES, "-n3")[1]))
    assert maps[0] == maps[1]


def test_a_worker_runs_its_list_in_planned_order(tiny: Any) -> None:
    result, ran = tiny.run(NAMES, "-n1")
    result.assert_outcomes(passed=len(NAMES))
    assert list(ran) == NAMES


def test_more_workers_than_groups_leaves_some_idle(tiny: Any) -> None:
    result, ran = tiny.run(NAMES[:8], "-n4")
    result.assert_outcomes(passed=8)
    assert len(set(places(ran).values())) == 2


@pytest.mark.parametrize("fault", ["exit", "kill", "segfault"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_death_costs_one_test_and_the_rest_stays_in_its_place(tiny: Any, fault: str, workers: int) -> None:
    undisturbed = places(tiny.run(NAMES, f"-n{workers}")[1])
    result, ran = tiny.run(NAMES, f"-n{workers}", faults={"b-1": fault})
    result.assert_outcomes(passed=len(NAMES) - 1, failed=1)
    assert result.ret == 1
    assert places(ran) == undisturbed
    result.stdout.fnmatch_lines(["*crashed while running 'test_tiny.py::test[[]b-1[]]'*"])
    mine = [worker for name, ((place, worker),) in ran.items() if place == undisturbed["b-1"] and name > "b-1"]
    assert len(set(mine)) == 1, "one replacement ran what was left"
    assert mine[0] != ran["b-1"][0][1]


def test_every_death_costs_one_test(tiny: Any) -> None:
    faults = dict.fromkeys(["a-0", "a-1", "c-3", "e-2", "e-3"], "exit")
    result, ran = tiny.run(NAMES, "-n2", "--max-worker-restart=20", faults=faults)
    result.assert_outcomes(passed=len(NAMES) - len(faults), failed=len(faults))
    assert len(places(ran)) == len(NAMES)


def test_every_test_may_kill_its_worker(tiny: Any) -> None:
    result, ran = tiny.run(NAMES[:5], "-n1", "--max-worker-restart=20", faults=dict.fromkeys(NAMES, "exit"))
    result.assert_outcomes(failed=5)
    assert len(places(ran)) == 5


def test_a_death_between_tests_costs_nothing(tiny: Any) -> None:
    with (tiny.pytester.path / "conftest.py").open("a") as conftest:
        conftest.write("""

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    flag = LOG.with_name("died")
    if "b-2" in item.nodeid and not flag.exists():
        flag.touch()
        os._exit(86)
""")
    result, ran = tiny.run(NAMES, "-n2")
    result.assert_outcomes(passed=len(NAMES))
    assert len(places(ran)) == len(NAMES)


def test_workers_that_cannot_start_end_the_run(tiny: Any) -> None:
    with (tiny.pytester.path / "conftest.py").open("a") as conftest:
        conftest.write("""

if "PYTEST_XDIST_WORKER" in os.environ:
    os._exit(4)
""")
    result, ran = tiny.run(NAMES, "-n2", "--max-worker-restart=50")
    assert ran == {}
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*died again before it began a test*"])


def test_a_place_that_cannot_start_does_not_stop_the_others(tiny: Any) -> None:
    with (tiny.pytester.path / "conftest.py").open("a") as conftest:
        conftest.write("""

if os.environ.get(PLACE) == "1":
    os._exit(4)
""")
    result, ran = tiny.run(NAMES, "-n2", "--max-worker-restart=50")
    assert result.ret == 1
    assert 0 < len(ran) < len(NAMES)
    assert set(places(ran).values()) == {"0"}


def test_a_replacement_that_cannot_start_gives_its_place_up(tiny: Any) -> None:
    with (tiny.pytester.path / "conftest.py").open("a") as conftest:
        conftest.write("""

if os.environ.get("PYTEST_XDIST_WORKER") not in (None, "gw0", "gw1"):
    os._exit(4)
""")
    result, ran = tiny.run(NAMES, "-n2", "--max-worker-restart=50", faults={"a-1": "exit"})
    assert result.ret == 1
    assert 5 < len(ran) < len(NAMES)
    assert len(places(ran)) == len(ran)


def test_a_worker_that_collects_other_tests_runs_none(tiny: Any) -> None:
    source = (tiny.pytester.path / "test_tiny.py").read_text()
    names = '__import__("json").loads(os.environ["NAMES"])'
    odd = f'NAMES = {names}[: None if os.environ["PYTEST_XDIST_WORKER"] == "gw0" else 3]'
    tiny.pytester.makepyfile(test_tiny=source.replace(names, "NAMES").replace("\n\n@pytest", f"\n{odd}\n\n@pytest", 1))
    result, _ = tiny.run(NAMES, "-n2")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*Different tests were collected*"])


def test_maxfail_ends_the_run_early(tiny: Any) -> None:
    result, ran = tiny.run(NAMES, "-n2", "-x", faults={"a-0": "fail"})
    assert result.ret == 2
    assert len(ran) < len(NAMES)


def test_a_failing_test_is_no_death(tiny: Any) -> None:
    result, ran = tiny.run(NAMES, "-n2", faults={"a-0": "fail", "d-1": "fail"})
    result.assert_outcomes(passed=len(NAMES) - 2, failed=2)
    assert {worker for times in ran.values() for _, worker in times} == {"gw0", "gw1"}
