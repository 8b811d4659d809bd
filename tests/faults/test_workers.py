"""Workers and shards: the same report however the work is split, each worker on its own entry of the caller's GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsv4_matrix.report import canonical, telemetry
from dsv4_matrix.report.merge import merge

ROOT = Path(__file__).parents[2]


def test_one_report_for_any_number_of_workers(rig: Any) -> None:
    reports = []
    for arguments in ([], ["-n1"], ["-n2"], ["-n4"]):
        assert rig.run(*arguments).ret == 0
        reports.append(rig.path().read_bytes())
    assert len(set(reports)) == 1


def test_three_shards_merge_into_the_bytes_of_one_run(rig: Any, all_cases: tuple[str, ...]) -> None:
    faults = {"r0-eager-b": "fail", "r0-de-cg-a": "exit"}
    rig.run("-n2", faults=faults, report="whole.jsonl")
    started = []
    for index in (1, 2, 3):
        rig.run("-n2", "--matrix-shard", f"{index}/3", faults=faults, report=f"{index}.jsonl")
        started += [case_id for case_id, _, _ in rig.ran]
    assert sorted(started) == sorted(all_cases)
    shards = [(f"{k}", canonical.read(rig.path(f"{k}.jsonl"))) for k in (2, 3, 1)]
    assert canonical.dumps(merge(shards)) == rig.path("whole.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ("4/3", "there is no shard 4 of 3"),
        ("x", "not a shard"),
        ("1/9", "9 shards for 5 covered cells"),
        ("0/2", "no shard 0"),
    ],
)
def test_a_bad_shard_is_bad_input(rig: Any, shard: str, message: str) -> None:
    result = rig.run("--matrix-shard", shard)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in result.stderr.str()
    assert rig.ran == []


@pytest.mark.parametrize("timeout", ["0", "-1", "soon", "inf", "nan"])
def test_a_bad_timeout_is_bad_input(rig: Any, timeout: str) -> None:
    result = rig.run("--matrix-timeout", timeout)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"'{timeout}' is not a number of seconds above 0" in result.stderr.str()


@pytest.mark.parametrize(
    ("visible", "workers", "used"),
    [
        ("1", "auto", {"1"}),
        ("2,3", "auto", {"2", "3"}),
        ("7,GPU-aa-bb", "2", {"7", "GPU-aa-bb"}),
        ("MIG-aa,MIG-bb", "auto", {"MIG-aa", "MIG-bb"}),
        ("4,6", "1", {"4"}),
        ("4,6", "3", {"4", "6"}),
    ],
)
def test_each_worker_sees_its_entry_of_the_callers_list(
    rig: Any, monkeypatch: pytest.MonkeyPatch, visible: str, workers: str, used: set[str]
) -> None:
    monkeypatch.setenv("KIND", "gpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("GPUS", str(len(visible.split(","))))
    with (rig.pytester.path / "stub.py").open("a") as stub:
        stub.write("\nmachine.worker_count = lambda: len(machine.gpus())\n")
    assert rig.run("-n", workers).ret == 0
    assert {gpu for _, _, gpu in rig.ran} == used
    of_worker = {(worker, gpu) for _, worker, gpu in rig.ran}
    assert len({worker for worker, _ in of_worker}) == len(of_worker), "a worker stays on its GPU"


def test_pinned_before_torch_is_imported(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is there when the worker's very first plugin is imported."""
    monkeypatch.setenv("KIND", "gpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    rig.pytester.makepyfile(
        early="""
        import json, os, sys
        if "PYTEST_XDIST_WORKER" in os.environ:
            with open("early.txt", "a") as log:
                log.write(json.dumps([os.environ["CUDA_VISIBLE_DEVICES"], "torch" in sys.modules]) + "\\n")
        """
    )
    monkeypatch.syspath_prepend(rig.pytester.path)
    assert rig.run("-n2", "-p", "early").ret == 0
    seen = [json.loads(line) for line in (rig.pytester.path / "early.txt").read_text().splitlines()]
    assert sorted(seen) == [["5", False], ["6", False]]


def test_a_list_that_names_a_gpu_twice_is_refused(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIND", "gpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,1")
    with (rig.pytester.path / "stub.py").open("a") as stub:
        stub.write(
            "\nfrom dsv4_matrix.shard.gpus import visible_gpus\nmachine.gpus = lambda: visible_gpus(os.environ)\n"
        )
    result = rig.run("-n2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "names 1 twice" in result.stdout.str() + result.stderr.str()


def test_gpus_of_several_models_are_refused(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIND", "gpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with (rig.pytester.path / "stub.py").open("a") as stub:
        stub.write("\nmachine.models = lambda count: ('GPU A', 'GPU B')[:count]\n")
    result = rig.run("-n2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "several models (GPU A, GPU B)" in result.stdout.str() + result.stderr.str()
    assert rig.run("-n1").ret == 0


def test_a_case_id_among_the_parameters_of_another_test_means_nothing(rig: Any, all_cases: tuple[str, ...]) -> None:
    rig.pytester.makepyfile(
        test_other="""
        import pytest

        @pytest.mark.parametrize("name", ["r0-eager-a"])
        def test_other(name): ...
        """
    )
    result = rig.run("-n2")
    result.assert_outcomes(passed=len(all_cases) + 1)
    assert {line["outcome"] for line in rig.lines().values()} == {"passed"}


def test_a_run_whose_workers_cannot_start_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dead.py").write_text(
        "import os\nif os.environ.get('DSV4_MATRIX_PLACE'):\n    os._exit(5)\n"
        "from dsv4_triton import DSV4TritonBackend as Backend\n"
    )
    monkeypatch.delenv("DSV4_MATRIX_PLACE", raising=False)
    command = [sys.executable, "-m", "dsv4_matrix.cli", "run", "--matrix", str(ROOT / "matrix.yaml"), "-n", "2"]
    done = subprocess.run(
        [*command, "--backend", "dead:Backend", "--cells", "refusal-*,r0-eager-decode-idle"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 1
    assert "a worker died again before it began a test" in done.stdout


def test_what_a_worker_finds_wrong_ends_the_run_as_bad_input(rig: Any) -> None:
    """The controlling process imports no backend, so that a worker is the first to know; a replacement is no use."""
    result = rig.run("-n2", "--matrix-backend=absent_module:Backend")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: backend 'absent_module:Backend': module absent_module does not import" in result.stderr.str()
    assert rig.ran == []
    assert not rig.path().exists()


def test_a_worker_on_another_machine_than_foreseen_is_refused(rig: Any) -> None:
    """The header speaks of the machine that the controlling process foresaw: torch has the last word, in workers."""
    with (rig.pytester.path / "stub.py").open("a") as stub:
        stub.write(
            "\nif 'PYTEST_XDIST_WORKER' in os.environ:\n"
            "    Context.machine = property(lambda self: Machine('cpu', 'cpu', 'CPU interpreter', '2.12.0', '3.7.1'))\n"
        )
    result = rig.run("-n2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    told = result.stdout.str() + result.stderr.str()
    assert "runs on another machine than was foreseen: torch '2.12.0', not '2.13.0'" in told
    assert rig.ran == []


def test_the_controlling_process_never_loads_torch(rig: Any, all_cases: tuple[str, ...]) -> None:
    """Its import takes seconds, in which no worker could start."""
    rig.pytester.makepyfile(
        watch="""
        import os, sys

        def pytest_unconfigure(config):
            if "PYTEST_XDIST_WORKER" not in os.environ:
                open("controller.txt", "w").write(str("torch" in sys.modules))
        """
    )
    assert rig.run("-n2", "-p", "watch", faults={"r0-eager-a": "exit"}).ret == 1
    assert (rig.pytester.path / "controller.txt").read_text() == "False"


def test_telemetry_says_when_and_where_each_case_ran(rig: Any, all_cases: tuple[str, ...]) -> None:
    assert rig.run("-n2").ret == 0
    entries = telemetry.read(telemetry.telemetry_path(rig.path()))
    assert {entry.id for entry in entries} == set(all_cases)
    for worker in ("gw0", "gw1"):
        mine = sorted((entry for entry in entries if entry.worker == worker), key=lambda entry: entry.started)
        assert len(mine) > 1
        assert [entry.id for entry in mine] == [case_id for case_id, ran_on, _ in rig.ran if ran_on == worker]


def test_collecting_only_needs_no_worker(tmp_path: Path) -> None:
    """xdist starts none then, whatever -n says, and this process has to load the backend itself."""
    (tmp_path / "test_mine.py").write_text("def test_cell(matrix_case):\n    matrix_case.execute()\n")
    plain = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTEST_ADDOPTS")}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "dsv4_matrix", "-p", "xdist", "-n2", "--collect-only", "-q"),
            *(f"--matrix={ROOT / 'matrix.yaml'}", "--matrix-backend=triton", "--matrix-cells=refusal-page-size"),
        ],
        cwd=tmp_path,
        env={**plain, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    assert "test_mine.py::test_cell[refusal-page-size]" in done.stdout
