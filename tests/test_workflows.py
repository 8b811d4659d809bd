"""The workflows lint clean, a slip in them would be noticed, and they ask for no more than they need."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from dsv4_matrix.cli import _parser

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def zizmor(path: Path) -> subprocess.CompletedProcess[str]:
    binary = shutil.which("zizmor", path=str(Path(sys.executable).parent)) or shutil.which("zizmor")
    assert binary is not None, "zizmor is in the test extra: pip install -e '.[test]'"
    return subprocess.run([binary, "--offline", "--quiet", path], capture_output=True, text=True)


def test_they_lint_clean() -> None:
    done = zizmor(ROOT / ".github" / "workflows")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("text", "slip", "finding"),
    [
        ("@08c6903cd8c0fde910a37f88322edcfb5dd907a8", "@v5", "unpinned-uses"),
        ('--shards "$SHARDS"\n', "--shards ${{ inputs.runner }}\n", "template-injection"),
    ],
)
def test_a_slip_is_noticed(tmp_path: Path, text: str, slip: str, finding: str) -> None:
    source = (ROOT / ".github" / "workflows" / "gpu.yml").read_text()
    assert text in source
    (tmp_path / "gpu.yml").write_text(source.replace(text, slip))
    done = zizmor(tmp_path / "gpu.yml")
    assert done.returncode != 0
    assert f"[{finding}]" in done.stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_jobs_may_read_keep_no_token_and_end(path: Path) -> None:
    workflow = YAML(typ="safe").load(path)
    assert workflow["permissions"] == {}
    for job in workflow["jobs"].values():
        assert job["permissions"] == {"contents": "read"}
        assert job["timeout-minutes"] <= 120
        checkouts = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
        assert checkouts
        assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_runners_with_gpus_are_not_open_to_pull_requests() -> None:
    workflow = YAML().load(ROOT / ".github" / "workflows" / "gpu.yml")  # 1.2: `on` is a word, not a boolean
    assert set(workflow["on"]) == {"workflow_dispatch", "workflow_call"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_their_commands_are_this_programs(path: Path) -> None:
    """An option that was renamed would fail on a machine with GPUs, hours later."""
    runs = [step.get("run", "") for job in YAML(typ="safe").load(path)["jobs"].values() for step in job["steps"]]
    lines = "\n".join(runs).replace("\\\n", " ").splitlines()
    found = [line.split("dsv4-matrix", 1)[1].lstrip('"') for line in lines if "dsv4-matrix" in line]
    assert found
    for line in found:
        words = shlex.split(re.split(r"[|>)]", line)[0])
        assert _parser().parse_args(
            ["1/2" if word == "$SHARD" else "2" if word == "$SHARDS" else word for word in words]
        )


def test_the_gate_runs_on_the_gpu_and_leaves_evidence() -> None:
    workflow = YAML(typ="safe").load(ROOT / ".github" / "workflows" / "gpu.yml")
    (command,) = [step["run"] for step in workflow["jobs"]["gate"]["steps"] if " gate " in step.get("run", "")]
    assert {"--require-gpu", "--level", "L3", "--record"} <= set(shlex.split(command.replace("\\\n", " ")))
