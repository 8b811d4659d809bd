"""The gate's processes: both runs at once, none left behind, workers in plan order with the run's own process."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsv4_matrix import gate_child
from dsv4_matrix.gate import PLAN_A, PLAN_B, run_gate
from dsv4_matrix.report.bits import Level

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


ORPHANS = """
import multiprocessing, os, signal, threading, time
from dsv4_matrix.gate_child import _end_with_parent

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
    """Stands for the pool: workers that have begun the cases named so far, and never get to the others."""

    begun: tuple[str, ...] = ()
    made: tuple[int, ...] = ()

    def __init__(self, workers, *_):
        Pool.made = (*Pool.made, workers)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def submit(self, _, case_id):
        taken = case_id in self.begun
        return SimpleNamespace(cancel=lambda: not taken, cancelled=lambda: not taken, result=lambda: ("pool", case_id))


@pytest.mark.parametrize("begun", [(), ("a",), ("a", "c"), ("a", "b", "c")])
def test_each_case_is_run_once_by_the_first_that_is_free(monkeypatch, begun):
    monkeypatch.setattr(gate_child, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(gate_child, "_one", lambda context, plan, case, paths: ("here", case.id))
    monkeypatch.setattr(Pool, "begun", begun)
    monkeypatch.setattr(Pool, "made", ())
    cases = [SimpleNamespace(id=name) for name in "abc"]
    context = SimpleNamespace(options=None)
    assert sorted(gate_child._executed(context, PLAN_B, cases, ())) == sorted(
        ("pool" if name in begun else "here", name) for name in "abc"
    )
    assert Pool.made == (2,)  # of three workers for three cases one is this process


def test_a_worker_that_dies_leaves_the_names_of_what_it_may_have_run(monkeypatch):
    class Broken(Pool):
        def submit(self, _, case_id):
            def result():
                raise BrokenProcessPool("died")

            answered = case_id == "a"
            return SimpleNamespace(
                cancel=lambda: False,
                cancelled=lambda: False,
                exception=lambda: None if answered else BrokenProcessPool("died"),
                result=(lambda: ("pool", "a")) if answered else result,
            )

    monkeypatch.setattr(gate_child, "ProcessPoolExecutor", Broken)
    cases = [SimpleNamespace(id=name) for name in "abcdefg"]
    found = gate_child._executed(SimpleNamespace(options=None), replace(PLAN_B, workers=3), cases, ())
    assert next(found) == ("pool", "a")
    with pytest.raises(gate_child.WorkerDiedError, match=r"one of these: b, c, d$"):
        next(found)


def test_one_worker_needs_no_pool(monkeypatch):
    monkeypatch.setattr(gate_child, "ProcessPoolExecutor", None)
    monkeypatch.setattr(gate_child, "_one", lambda context, plan, case, paths: case.id)
    cases = [SimpleNamespace(id=name) for name in "ba"]
    assert list(gate_child._executed(SimpleNamespace(options=None), PLAN_A, cases, ())) == ["b", "a"]


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
    assert gate_child._architecture(context) == name
