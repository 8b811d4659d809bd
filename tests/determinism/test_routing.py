"""Routing: fixed answers, a partition whatever the order, and the routers that only look stable."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from itertools import chain
from zlib import crc32

import pytest

from dsv4_matrix.routing import ByCost, ByHash, RoutingError, check_ids, load_router, route

IDS = [
    f"r{ratio}-{mode}-bs{bs}" for ratio in (0, 4, 128) for mode in ("decode", "verify", "extend") for bs in range(32)
]


@pytest.mark.parametrize(
    ("name", "crc", "shards"),
    [
        ("dsv4.swa.triton_sparse.eager.bf16.bs1", 0x7F0781A4, (0, 1, 0, 4)),
        ("dsv4.csa4.triton_sparse.cudagraph.fp8kv.bs17", 0x67392645, (1, 0, 1, 5)),
        ("dsv4.hca128.torch_ref.eagle_verify_cudagraph.bf16.bs64", 0xCF054168, (0, 0, 0, 0)),
    ],
)
def test_fixed_answers(name, crc, shards):
    assert crc32(b"123456789") == 0xCBF43926
    assert crc32(name.encode()) == crc
    assert tuple(ByHash().place(name, places) for places in (2, 3, 4, 8)) == shards


@pytest.mark.parametrize("router", [ByHash(), ByCost(), ByCost({IDS[0]: 90, IDS[5]: 7})], ids=["hash", "even", "cost"])
def test_partition(router):
    for places in range(1, 17):
        found = route(IDS, places, router)
        assert sorted(chain.from_iterable(found)) == sorted(IDS)
        assert len(found) == places
        shuffled = random.Random(places).sample(IDS, len(IDS))
        assert route(shuffled, places, router) == found


def test_another_case_moves_none():
    before = route(IDS, 7)
    after = route([*IDS, "r0-new"], 7)
    assert [tuple(name for name in names if name != "r0-new") for names in after] == list(before)


@pytest.mark.parametrize(
    "environ", [{"PYTHONHASHSEED": "0"}, {"PYTHONHASHSEED": "1"}, {"LC_ALL": "C"}, {"LC_ALL": "C.UTF-8"}]
)
def test_the_same_map_in_every_process(environ):
    program = "import sys; from dsv4_matrix.routing import route; print(route(sys.argv[1:], 5))"
    done = subprocess.run(
        [sys.executable, "-c", program, *IDS], env={**os.environ, **environ}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(route(IDS, 5))


def test_a_router_over_hash_differs_between_processes():
    program = "import sys; print([hash(name) % 5 for name in sys.argv[1:]])"
    maps = {
        subprocess.run(
            [sys.executable, "-c", program, *IDS[:20]],
            env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("0", "1")
    }  # fmt: skip
    assert len(maps) == 2


def test_groups_stay_together():
    groups = {name: "one-fixture" for name in IDS if "verify" in name}
    found = route(IDS, 6, ByHash(groups))
    assert sum(any(name in groups for name in names) for names in found) == 1


def test_two_levels_need_two_parts_of_the_hash():
    of_runner = route(IDS, 4)[1]
    spread = route(of_runner, 4, ByHash(divided_by=4))
    assert all(spread)
    trap = route(of_runner, 4)
    assert sum(map(bool, trap)) == 1


def test_costs_balance():
    costs = {name: 1 + at % 9 for at, name in enumerate(IDS)}
    totals = [sum(costs[name] for name in names) for names in route(IDS, 8, ByCost(costs))]
    assert max(totals) - min(totals) <= 9


class LeastLoaded:
    """Ties by crc32, and still the load, which follows arrival, decides."""

    def assign(self, ids, places):
        found, load = [[] for _ in range(places)], [0] * places
        for name in ids:
            free = [at for at in range(places) if load[at] == min(load)]
            at = free[crc32(name.encode()) % len(free)]
            found[at].append(name)
            load[at] += len(name)
        return tuple(tuple(sorted(names)) for names in found)


class Forgetful:
    def assign(self, ids, places):
        return (tuple(sorted(ids))[1:], *[()] * (places - 1))


def test_routers_that_are_not_pure_are_refused():
    with pytest.raises(RoutingError, match="LeastLoaded put ids elsewhere"):
        route(IDS, 4, LeastLoaded())
    with pytest.raises(RoutingError, match="Forgetful did not put each"):
        route(IDS, 4, Forgetful())
    with pytest.raises(RoutingError, match="0 places"):
        route(IDS, 0)


@pytest.mark.parametrize("name", ["Upper", "with space", "ümlaut", "", "a/b", "x" * 201, "line\n"])
def test_ids_that_are_not_canonical(name):
    with pytest.raises(RoutingError, match="is not 1 to 200"):
        check_ids([name])


def test_ids_twice_or_as_a_set():
    with pytest.raises(RoutingError, match="twice: a, b"):
        check_ids(["b", "a", "c", "a", "b"])
    with pytest.raises(RoutingError, match="set"):
        route({"a", "b"}, 2)


class Pinned(ByHash):
    """A user's own: everything to the first place."""

    def place(self, name, places):
        return 0


def test_a_router_can_be_replaced():
    assert route(IDS, 3, Pinned())[0] == tuple(sorted(IDS))
    assert isinstance(load_router("dsv4_matrix.routing:ByCost"), ByCost)
    for wrong in ("dsv4_matrix.routing:Missing", "no_such_module:x", "dsv4_matrix.routing", "dsv4_matrix.routing:_ID"):
        with pytest.raises(RoutingError, match="router"):
            load_router(wrong)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise SystemExit('bye')", "module mine does not import: it ended in SystemExit('bye') (mine.py:1)"),
        ("1 / 0", "module mine does not import: ZeroDivisionError: division by zero (mine.py:1)"),
        (
            "class Router:\n    def __init__(self):\n        raise SystemExit('bye')",
            "cannot be made: it ended in SystemExit('bye') (mine.py:3)",
        ),
    ],
)
def test_a_router_that_does_not_load_is_told_with_its_place(import_folder, monkeypatch, code, told):
    (import_folder / "mine.py").write_text(code + "\n")
    monkeypatch.syspath_prepend(import_folder)
    monkeypatch.chdir(import_folder)
    with pytest.raises(RoutingError) as caught:
        load_router("mine:Router")
    assert str(caught.value).partition("'mine:Router'")[2].lstrip(": ") == told
