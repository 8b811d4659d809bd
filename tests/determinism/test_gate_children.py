"""The gate's processes: both runs at once, none left behind, workers in plan order with the run's own process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsv4_matrix import composition
from dsv4_matrix.admission import NotAdmittedError
from dsv4_matrix.context import BadInputError, Context, Options
from dsv4_matrix.gate import PLAN_A, PLAN_B, run_gate
from dsv4_matrix.gate_command import child, session, workers
from dsv4_matrix.report.bits import Level
from dsv4_matrix.routing import RoutingError

TOY = Path(__file__).parent / "toy_run.py"


def test_a_run_that_fails_ends_the_other(tmp_path, capfd):
    status = run_gate(
        lambda plan, report: [str(TOY), str(report), "crash-beside-a-hang"],
        level=Level.BATCH,
        minimum=1,
        folder=tmp_path,
    )
    assert status == 1
    assert "run B ended with status 3" in capfd.readouterr().out
    pid = int(next(tmp_path.glob("gate-*/A.pid")).read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(("devices", "which"), [(("", ""), ""), (("0", "1"), ", run [AB]")])
def test_bad_input_that_a_run_finds_is_one_line_with_its_own_status(tmp_path, capfd, devices, which):
    """Both runs find it; on two devices it may be of one of them."""
    status = run_gate(
        lambda plan, report: [str(TOY), str(report), "bad-input"],
        level=Level.DEVICE,
        minimum=1,
        folder=tmp_path,
        plans=tuple(replace(plan, device=device) for plan, device in zip((PLAN_A, PLAN_B), devices, strict=True)),
    )
    assert status == 2
    told = capfd.readouterr()
    assert re.fullmatch(f"dsv4-matrix gate{which}: there is no such backend\n", told.err)
    assert "aligned" not in told.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"every": 0}, {"every": -3}, {"minimum": 0}, {"minimum": -1}])
def test_a_number_below_one_is_refused_where_it_is_read(tmp_path, capsys, options):
    (name, value), folder = *options.items(), tmp_path / "gate"
    assert session.gate(cells="r0-eager-decode-within-window", folder=folder, **options) == 2
    assert capsys.readouterr() == ("", f"dsv4-matrix gate: --{name} {value}: give a number from 1 on\n")
    assert not folder.exists()


ORPHANS = """
import multiprocessing, os, signal, threading, time
from dsv4_matrix.gate_command.workers import _end_with_parent

def worker(told):
    threading.Thread(target=_end_with_parent, daemon=True).start()
    told.send(os.getpid())
    time.sleep(600)

if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=worker, args=(theirs,)).start()
    print(ours.recv(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_with_their_run(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(ORPHANS)
    # The worker holds the pipe open for as long as it lives, so that this returns when it has ended, or raises.
    done = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, timeout=120, check=False)
    assert done.returncode == -9
    assert int(done.stdout) > 0


class Pool:
    """Stands for a pool of one worker, whose case ``dies`` if it has that one."""

    dies = ""
    made = 0
    cancelled = 0

    def __init__(self, workers, *_):
        assert workers == 1
        Pool.made += 1
        self.dead = False

    def shutdown(self, *, cancel_futures):
        Pool.cancelled += cancel_futures

    def submit(self, _, case_id):
        self.dead = dead = self.dead or case_id == self.dies

        def result():
            if dead:
                raise BrokenProcessPool("died")
            return "pool", case_id

        return SimpleNamespace(result=result)


def made(name, **more):
    variant = SimpleNamespace(**{"num_steps": 1, "forward": "decode", "extend_lens": (), **more})
    return SimpleNamespace(id=name, cell=SimpleNamespace(mode="eager"), variant=variant)


CONTEXT = SimpleNamespace(options=None, machine=SimpleNamespace(kind="gpu"))


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setattr(workers, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(workers, "_one", lambda context, plan, case, paths: ("here", case.id))
    monkeypatch.setattr(Pool, "made", 0)
    monkeypatch.setattr(Pool, "cancelled", 0)
    monkeypatch.setattr(Pool, "dies", "")
    return Pool


class Halves:
    """Ids up to ``c`` in the first place, the others in the second."""

    def assign(self, ids, places):
        halves = tuple(sorted(i for i in ids if i <= "c")), tuple(sorted(i for i in ids if i > "c"))
        return (*halves, *((),) * (places - 2))


def test_each_case_is_run_once_and_the_first_place_is_this_process(pool):
    cases = [made(name) for name in "fedcba"]
    found = list(workers.executed(CONTEXT, replace(PLAN_B, workers=4), cases, (), Halves()))
    assert found == [*(("here", name) for name in "cba"), *(("pool", name) for name in "fed")]
    assert pool.made == 1  # places without a case start nothing


def test_one_worker_needs_no_pool(pool):
    assert list(workers.executed(CONTEXT, PLAN_A, [made("b"), made("a")], ())) == [("here", "b"), ("here", "a")]
    assert pool.made == 0


def test_a_worker_that_dies_leaves_the_name_of_its_case(pool):
    pool.dies = "e"
    found = workers.executed(CONTEXT, replace(PLAN_B, workers=2), [made(name) for name in "abcdefg"], (), Halves())
    assert [next(found) for _ in range(4)] == [("here", "a"), ("here", "b"), ("here", "c"), ("pool", "d")]
    assert pool.cancelled == 0
    with pytest.raises(workers.WorkerDiedError, match="a worker died in case e"):
        next(found)
    assert pool.cancelled == 1, "the run waits for cases that nobody asks for any more"


def test_places_follow_the_ids_and_their_cost():
    cases = [made("a", num_steps=4), made("b", forward="extend", extend_lens=(3, 70)), *map(made, "cdefghij")]
    for device in ("gpu", "cpu"):
        places = workers.placed(cases, 3, device)
        again = workers.placed(cases[::-1], 3, device)
        assert [sorted(case.id for case in place) for place in places] == [sorted(c.id for c in p) for p in again]
        assert sorted(case.id for place in places for case in place) == list("abcdefghij")
    first, _ = workers.placed(cases, 2, "cpu")
    assert [case.id for case in first] == ["b"]
    assert len(workers.placed(cases[:2], 8, "gpu")) == 2


def test_a_router_that_is_not_pure_is_refused():
    class Loaded:
        calls = 0

        def assign(self, ids, places):
            Loaded.calls += 1
            shift = Loaded.calls % places
            return tuple(tuple(sorted(i for i in ids if (ord(i) + shift) % places == p)) for p in range(places))

    with pytest.raises(RoutingError, match="it must look at the ids alone"):
        workers.placed([made(name) for name in "abcdef"], 2, "gpu", Loaded())


@pytest.mark.parametrize(
    ("promise", "concurrency", "said"),
    [
        ("L2", "batch_invariant", "promises L2, not L3; --level L2 is what it promises"),
        ("L3", "serial_only", "no promise about batches; --level L1 compares its requests one at a time"),
    ],
)
def test_a_path_that_is_not_admitted_names_the_level_that_would_be(promise, concurrency, said):
    path = {"path": "attention", "architectures": ["interpreter"], "promise": promise, "concurrency": concurrency}
    with pytest.raises(NotAdmittedError, match=said):
        child.admitted(declaring(path), [made("a")], Level.GRAPH)


def declaring(path):
    """A context on a CPU whose backend declares this one path."""
    backend = SimpleNamespace(name="mine", original=SimpleNamespace(DETERMINISM=[path]))
    return SimpleNamespace(machine=SimpleNamespace(kind="cpu"), setup=SimpleNamespace(backend=backend))


def test_a_declaration_that_cannot_be_read_is_bad_input():
    with pytest.raises(BadInputError, match="backend mine: DETERMINISM: entry 'attention' has"):
        child.admitted(declaring({"path": "attention"}), [made("a")], Level.GRAPH)


@pytest.mark.parametrize("error", [BadInputError("--matrix-x: no such file"), RoutingError("no such router")])
def test_bad_input_ends_a_run_and_is_left_for_the_gate_to_tell(monkeypatch, capsys, tmp_path, error):
    assert run_that_raises(monkeypatch, tmp_path, error) == child.BAD_INPUT
    assert capsys.readouterr().err == ""
    assert (tmp_path / "report.refusal").read_text() == f"{error}\n".replace("--matrix-x", "--x")


@pytest.mark.parametrize("error", [NotAdmittedError("no promise"), workers.WorkerDiedError("in case a")])
def test_what_is_no_bad_input_ends_a_run_with_its_reason(monkeypatch, capsys, tmp_path, error):
    assert run_that_raises(monkeypatch, tmp_path, error) == child.SHORT
    assert capsys.readouterr().err == f"dsv4-matrix gate, run A: {error}\n"
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_names_the_case_of_its_worker(monkeypatch, capfd, tmp_path):
    """A case in the run's own process; a worker's says the same, and its run gets the interrupt with the result."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(composition, "execute_composed", interrupted)
    context = SimpleNamespace(options=SimpleNamespace(report=tmp_path / "A.jsonl"), timeout=60, setup=None)
    with pytest.raises(KeyboardInterrupt):
        workers._one(context, PLAN_A, made("a"), ())
    assert capfd.readouterr().err == "dsv4-matrix gate, run A: interrupted in case a\n"
    assert run_that_raises(monkeypatch, tmp_path, KeyboardInterrupt()) == child.INTERRUPTED
    assert capfd.readouterr().err == ""


def test_a_mistake_of_the_harness_is_not_taken_for_bad_input(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="shapes differ"):
        run_that_raises(monkeypatch, tmp_path, ValueError("shapes differ"))


def run_that_raises(monkeypatch, folder, error):
    def run(*_):
        raise error

    monkeypatch.setattr(child, "_run", run)
    for name, value in PLAN_A.environ("a").items():
        monkeypatch.setenv(name, value)
    return child.main(["--matrix", "matrix.yaml", "--report", str(folder / "report.jsonl")])


@pytest.mark.parametrize(
    ("kind", "hip", "capability", "name"),
    [
        ("cpu", None, (9, 0), "interpreter"),
        ("gpu", None, (9, 0), "sm90"),
        ("gpu", None, (10, 3), "sm103"),
        ("gpu", "7.0", (9, 5), "gfx950"),
    ],
)
def test_the_architecture_is_named_as_backends_declare_it(monkeypatch, kind, hip, capability, name):
    properties = SimpleNamespace(gcnArchName="gfx950:sramecc+:xnack-")
    cuda = SimpleNamespace(get_device_capability=lambda _: capability, get_device_properties=lambda _: properties)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=hip)))
    context = SimpleNamespace(machine=SimpleNamespace(kind=kind))
    assert child._architecture(context) == name


@pytest.mark.parametrize(
    ("cells", "rows"),
    [
        ("r0-eager-decode-within-window,r0-eager-decode-above-window", 4),
        ("r0-eager-decode-within-window,r0-eager-decode-idle,*-refused,refusal-*", 2),  # only one has rows
        ("r0-eager-decode-large-pool", 1),  # on a GPU only: how many rows depends on the device
    ],
)
def test_what_is_compared_at_least(cells, rows):
    assert session._least(Context(Options.of_command(cells=cells)), 1, Level.BATCH) == rows


@pytest.mark.parametrize(
    ("cells", "level"),
    [("*-refused", Level.BATCH), ("refusal-*,r0-eager-decode-idle", Level.BATCH), ("r0-*", Level.DEVICE)],
)
def test_a_selection_of_which_nothing_can_be_compared_is_refused(cells, level):
    with pytest.raises(
        BadInputError, match=rf"none of the \d+ selected cases can be compared at {level.value}: a probe"
    ):
        session._least(Context(Options.of_command(cells=cells)), 1, level)
