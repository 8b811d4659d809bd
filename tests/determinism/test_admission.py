"""Admission: declared paths on declared architectures, one request at a time where that is all, frozen values."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from types import SimpleNamespace

import pytest

from dsv4_matrix.admission import (
    Concurrency,
    ConcurrencyError,
    KernelPath,
    NotAdmittedError,
    Rule,
    admit,
    declared,
    not_repeatable,
    serialise,
)
from dsv4_matrix.overrides import override
from dsv4_matrix.report.bits import Level

ENTRY = {"path": "attention", "architectures": ["sm90"], "promise": "L3", "concurrency": "batch_invariant"}


def path(name="attention", architectures=("sm90",), promise=Level.GRAPH, concurrency=Concurrency.BATCH_INVARIANT):
    return KernelPath(name, architectures, promise, concurrency)


def backend(*entries):
    return SimpleNamespace(DETERMINISM=entries)


def test_a_backend_declares_for_itself():
    assert declared(backend(ENTRY)) == (path(),)
    assert declared(SimpleNamespace()) == ()


class Declares:
    DETERMINISM = (ENTRY,)

    def forward(self): ...

    def attend(self): ...


class Renamed(Declares): ...


class OwnKernel(Renamed):
    def attend(self): ...


class Promises(OwnKernel):
    DETERMINISM = ({**ENTRY, "promise": "L1"},)


class Deeper(Promises):
    def forward(self): ...


def test_an_inherited_declaration_speaks_of_inherited_methods():
    assert declared(Renamed) == declared(Declares) == (path(),)
    assert [one.promise.value for one in declared(Promises)] == ["L1"]
    with pytest.raises(ValueError, match="DETERMINISM is Declares's, and speaks of its attend; OwnKernel has its own"):
        declared(OwnKernel)
    with pytest.raises(ValueError, match="DETERMINISM is Promises's, and speaks of its forward; Deeper has its own"):
        declared(Deeper)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"concurrency": "batch_invariantt"}, "batch_invariantt"),
        ({"promise": "L7"}, "L7"),
        ({"architectures": "sm90"}, "list of names"),
        ({"architectures": []}, "list of names"),
        ({"extra": 1}, "extra"),
        ({"path": ""}, "expected"),
    ],
)
def test_mistakes_in_a_declaration(change, told):
    with pytest.raises(ValueError, match=told):
        declared(backend({**ENTRY, **change}))


def test_a_path_declared_twice():
    with pytest.raises(ValueError, match="twice"):
        declared(backend(ENTRY, ENTRY))


def test_admission_is_by_path_and_architecture():
    paths = (path(), path("prefill", ("sm90", "sm100")))
    assert admit(paths, ["prefill"], "sm100") == (paths[1],)
    with pytest.raises(NotAdmittedError, match=r"attention declares determinism on sm90, not on sm100; .*: prefill"):
        admit(paths, ["attention"], "sm100")
    with pytest.raises(
        NotAdmittedError, match=r"combine declares no determinism; on sm90 these do: attention, prefill"
    ):
        admit(paths, ["attention", "combine"], "sm90")
    with pytest.raises(NotAdmittedError, match="these do: none"):
        admit((), ["attention"], "sm90")


@pytest.mark.parametrize("concurrency", [Concurrency.SERIAL_ONLY, Concurrency.UNKNOWN])
def test_serial_paths_say_so_at_level_two_and_run_below(concurrency):
    serial = path(promise=Level.SAME_CASES, concurrency=concurrency)
    assert serial.unsupported(Level.SAME_PLAN) == serial.unsupported(Level.SAME_CASES) == ""
    assert serial.unsupported(Level.BATCH) == (
        f"unsupported({concurrency.value}): attention makes no promise about batches"
    )
    serial.check_requests(1)
    for requests in (0, 2):
        with pytest.raises(ConcurrencyError, match=f"attention is {concurrency.value} and got {requests} requests"):
            serial.check_requests(requests)


def test_invariant_paths_take_any_batch_up_to_their_promise():
    invariant = path(promise=Level.BATCH)
    invariant.check_requests(64)
    assert invariant.unsupported(Level.BATCH) == ""
    assert "promises L2, not L3" in invariant.unsupported(Level.GRAPH)


@pytest.mark.parametrize(
    ("rule", "coins", "sampled", "seeded", "repeatable"),
    [
        (Rule.GREEDY, False, False, False, True),
        (Rule.GREEDY, False, True, False, False),
        (Rule.TARGET_ONLY, True, False, False, True),
        (Rule.TARGET_ONLY, False, False, False, False),
        (Rule.CLASSIC, True, True, True, True),
        (Rule.CLASSIC, True, True, False, False),
        (Rule.CLASSIC, False, True, True, False),
    ],
)
def test_repeatability_of_a_verify_step(rule, coins, sampled, seeded, repeatable):
    told = not_repeatable(rule, coins_seeded=coins, draft_sampled=sampled, draft_seeded=seeded)
    assert (told == "") is repeatable
    assert repeatable or told.startswith(f"nondeterministic: {rule.value}")


def test_block_verification_is_reserved():
    with pytest.raises(NotImplementedError, match="reserved"):
        not_repeatable(Rule.BLOCK, coins_seeded=True, draft_sampled=False, draft_seeded=False)


@dataclasses.dataclass(frozen=True)
class Engine:
    max_requests: int = 8
    name: str = "e"


def test_overrides_are_new_values_and_recorded():
    shared = Engine()
    changed, forced = override(shared, "a rule", max_requests=1, name="e")
    assert (shared.max_requests, changed.max_requests) == (8, 1)
    assert [dataclasses.astuple(record) for record in forced] == [("max_requests", "8", "1", "a rule")]
    with pytest.raises(TypeError, match="max_seqs"):
        override(shared, "a rule", max_seqs=1)

    @dataclasses.dataclass
    class Shared:
        max_requests: int = 8

    for not_frozen in (Shared(), {"max_requests": 8}):
        with pytest.raises(TypeError, match="frozen"):
            override(not_frozen, "a rule", max_requests=1)


@pytest.mark.parametrize(
    ("deterministic", "concurrency", "limit"), list(itertools.product([True, False], Concurrency, [8, 1]))
)
def test_only_what_needs_it_is_serialised(deterministic, concurrency, limit):
    config = Engine(max_requests=limit)
    changed, forced = serialise(
        config, path(concurrency=concurrency), deterministic=deterministic, field="max_requests"
    )
    serial = deterministic and concurrency is not Concurrency.BATCH_INVARIANT
    assert changed.max_requests == (1 if serial else limit)
    assert bool(forced) is (serial and limit != 1)
    assert config.max_requests == limit


def test_it_needs_no_torch():
    program = "import sys, dsv4_matrix.admission; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
