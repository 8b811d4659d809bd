"""The command without a GPU: what it refuses, and a document rendered on another machine than it was measured on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsv4_matrix.bench import document
from dsv4_matrix.cli import main
from dsv4_matrix.loading import LoadError, load_kernel

ROOT = Path(__file__).parents[2]


@pytest.fixture
def measured(results, tmp_path) -> Path:
    path = tmp_path / "bench.json"
    document.write(results, path)
    return path


def test_a_document_is_printed_as_the_run_printed_it(measured, capsys):
    assert main(["bench", "--from", str(measured)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("kernel mine, gpu NVIDIA H200, triton 3.6.0\npeer table:\nshape ")
    assert "store                                                    66.0 %  at least 70: not met\n" in out
    assert (
        "dsv4_triton.store._pack_and_store: 4 warps, 55 registers, no spills, 64 bytes shared  MAPPED=1 ROWS=8" in out
    )


def test_a_document_becomes_markdown_and_a_plot(measured, capsys, tmp_path):
    assert main(["bench", "--from", str(measured), "--table", "--plot", str(tmp_path / "bench.svg")]) == 0
    assert "| shape | µs |" in capsys.readouterr().out
    assert (tmp_path / "bench.svg").read_text().startswith("<svg ")


def test_rendering_needs_no_torch(measured):
    script = f"import sys; from dsv4_matrix.cli import main; main(['bench', '--from', {str(measured)!r}, '--table']); "
    done = subprocess.run(
        [sys.executable, "-c", script + "sys.exit('torch' in sys.modules)"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "x.json", "--shapes", "*"], "--from reads what was measured; --shapes would measure"),
        (["--table"], "--table renders a document: measure with --json PATH, then --from PATH --table"),
        (["--plot", "x.png"], "--plot writes SVG: expected a name that ends in .svg, got x.png"),
        (["--plot", "x.svg", "--steps"], "--plot draws shapes, and --steps alone measures none"),
        (["--json", "absent/x.json"], "--json: absent/x.json: there is no directory absent; create it first"),
        (["--plot", "absent/x.svg"], "--plot: absent/x.svg: there is no directory absent; create it first"),
        (["--from", "nothing.json"], "nothing.json: cannot read the document: No such file"),
    ],
)
def test_options_that_do_not_go_together_are_refused_at_once(arguments, said, capsys):
    assert main(["bench", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"dsv4-matrix bench: {said}")


def test_nothing_to_plot_is_refused(results, tmp_path, capsys):
    results.groups = {}
    document.write(results, tmp_path / "bench.json")
    assert main(["bench", "--from", str(tmp_path / "bench.json"), "--plot", str(tmp_path / "bench.svg")]) == 2
    assert "a plot shows shapes, and none was measured" in capsys.readouterr().err
    assert not (tmp_path / "bench.svg").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    command = [sys.executable, "-m", "dsv4_matrix.cli", "bench", "--kernel", "dsv4_matrix.loading:load_kernel"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "dsv4-matrix bench: there is no GPU here: torch.cuda.is_available() is False; measure with --json PATH where "
        "there is one, and render that anywhere with --from PATH\n"
    )


def test_kernels_are_found_as_backends_are():
    name, function = load_kernel("dsv4_matrix.loading:load_kernel")
    assert (name, function) == ("dsv4_matrix.loading:load_kernel", load_kernel)
    with pytest.raises(LoadError, match="cannot be called"):
        load_kernel("dsv4_matrix.loading:KERNELS")


def test_a_kernel_of_a_checkout_without_entry_points(tmp_path):
    """Nothing installed, nothing on the path but the checkout's root, as ``python -m`` there has it."""
    package = tmp_path / "backends" / "theirs"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def attend(): ...\n")
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import dsv4_matrix.loading as loading\n"
        "loading.entry_points = lambda group: ()\n"
        "print(loading.load_kernel('theirs:attend')[1].__module__)\n"
        "try: loading.load_kernel('others:attend')\n"
        "except loading.LoadError as error: print(error)\n"
        "try: loading.load_kernel()\n"
        "except loading.LoadError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    found, missing, none = done.stdout.splitlines()
    assert found == "theirs"
    assert f"module others does not import (from {tmp_path}, backends/, references/ in it and sys.path)" in missing
    assert "no kernel is selected; choose one with --kernel NAME or --kernel module:attr" in none
