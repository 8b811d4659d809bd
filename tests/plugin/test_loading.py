"""A backend is checked when it is loaded, and every mistake in it is named then."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from dsv4_matrix import loading
from dsv4_matrix.loading import LoadError, load_backend, load_kernel, load_reference
from dsv4_matrix.protocol import AttentionBackend

METHODS = [name for name in vars(AttentionBackend) if not name.startswith("_")]


def backend_source(without: str = "", extra: str = "") -> str:
    """A class with the Protocol's methods in any shape, one left out, one replaced."""
    body = [f"    def {name}(self, *args, **kwargs): ..." for name in METHODS if name != without]
    body.append("    @classmethod\n    def multi_step(cls, runner, *, num_steps, compress_ratio=0): return object()")
    return "class Mine:\n    def __init__(self, runner): ...\n" + "\n".join(body) + "\n" + extra


def test_module_attr_is_imported_from_the_working_directory(import_folder: Path) -> None:
    (import_folder / "mine.py").write_text(backend_source())
    backend = load_backend("mine:Mine", import_folder)
    assert backend.name == "mine:Mine"
    assert type(backend.factory(None)).__name__ == "Mine"  # type: ignore[arg-type]


@pytest.mark.parametrize("method", METHODS)
def test_each_missing_method_is_named_at_load(import_folder: Path, method: str) -> None:
    (import_folder / "mine.py").write_text(backend_source(without=method))
    with pytest.raises(LoadError, match=rf"class mine\.Mine.* lacks {method}\. See AttentionBackend"):
        load_backend("mine:Mine", import_folder)


def test_missing_multi_step_is_named(import_folder: Path) -> None:
    (import_folder / "mine.py").write_text(backend_source().replace("multi_step", "many_steps"))
    with pytest.raises(LoadError, match="lacks multi_step"):
        load_backend("mine:Mine", import_folder)


@pytest.mark.parametrize(
    "method",
    [
        "def store_kv(self, batch): ...",
        "def forward(self, q, batch, compress_ratio): ...",
        "def forward(self, q, batch, compress_ratio, attn_sink, block_table): ...",
        "def init_forward_metadata_out_graph(self, batch): ...",
        "def kv_buffers(self, which): ...",
    ],
)
def test_a_method_that_cannot_be_called_as_declared_is_named(import_folder: Path, method: str) -> None:
    (import_folder / "mine.py").write_text(backend_source(extra=f"    {method}\n"))
    name = method.split("(")[0].removeprefix("def ")
    with pytest.raises(LoadError, match=rf"cannot be called as declared: {name}\("):
        load_backend("mine:Mine", import_folder)


def test_what_a_factory_makes_is_checked_when_it_is_made(import_folder: Path) -> None:
    source = (
        backend_source(without="store_kv")
        + "def make(runner): return Mine(runner)\nmake.multi_step = Mine.multi_step\n"
    )
    (import_folder / "mine.py").write_text(source)
    backend = load_backend("mine:make", import_folder)
    with pytest.raises(LoadError, match=r"the backend it makes .* lacks store_kv"):
        backend.factory(None)  # type: ignore[arg-type]
    with pytest.raises(LoadError, match=r"what its multi_step makes .* lacks attn_backends, step_batch"):
        backend.factory.multi_step(None, num_steps=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("selection", "told"),
    [
        ("gone:Mine", r"module gone does not import \(from .*No module named 'gone'"),
        ("broken:Mine", "module broken does not import: ZeroDivisionError"),
        ("mine:", "is not of the form module:attr"),
        ("mine:CONSTANT", "cannot be called"),
        ("nobody", r"there is no backend 'nobody'; installed backends: .*; code that is not installed"),
    ],
)
def test_a_wrong_selection_never_falls_back(import_folder: Path, selection: str, told: str) -> None:
    (import_folder / "mine.py").write_text(backend_source() + "CONSTANT = 3\n")
    (import_folder / "broken.py").write_text("1 / 0\n")
    with pytest.raises(LoadError, match=told):
        load_backend(selection, import_folder)


#: Modules that do not import, and what is said of each after ``does not import``.
UNIMPORTABLE = {
    "raise SystemExit('bye')\n": r": it ended in SystemExit\('bye'\) \(mine\.py:1\)$",
    "import sys\nsys.exit(0)\n": r": it ended in SystemExit\(0\) \(mine\.py:2\)$",
    "def check():\n    raise RuntimeError('no')\n\ncheck()\n": r": RuntimeError: no \(mine\.py:2\)$",
    "import helper.deep\n": r": RuntimeError: deep \(helper/deep\.py:2\)$",
    "import json\n\njson.loads('')\n": r": JSONDecodeError: .* \(mine\.py:3\)$",
    "import no_such_lib\n": r": ModuleNotFoundError: No module named 'no_such_lib' \(mine\.py:1\); mine itself "
    "was found, but not what it imports there: install that in this environment$",
    "from json import nothing\n": r": ImportError: .* \(mine\.py:1\); mine itself was found",
    "def (:\n": r": SyntaxError: .*\(mine\.py, line 1\)$",
}


@pytest.mark.parametrize("source", UNIMPORTABLE)
@pytest.mark.parametrize(
    ("load", "role"), [(load_backend, "backend"), (load_reference, "reference"), (load_kernel, "kernel")]
)
def test_a_module_that_does_not_import_is_named_with_the_place(
    import_folder: Path, load: Callable[..., object], role: str, source: str
) -> None:
    (import_folder / "mine.py").write_text(source)
    (import_folder / "helper").mkdir()
    (import_folder / "helper/deep.py").write_text("\nraise RuntimeError('deep')\n")
    with pytest.raises(LoadError, match=f"^{role} 'mine:Mine': module mine does not import{UNIMPORTABLE[source]}"):
        load("mine:Mine", import_folder)


def test_what_is_installed_in_the_folder_is_not_the_users_own(import_folder: Path) -> None:
    """A virtual environment often lies there: the place is where the user's code called, not deep in another's."""
    installed = import_folder / "venv/lib/site-packages"
    installed.mkdir(parents=True)
    (installed / "theirs.py").write_text("def check():\n    raise RuntimeError('no')\n")
    (import_folder / "mine").mkdir()
    (import_folder / "mine/code.py").write_text("import theirs\n\ntheirs.check()\n")
    sys.path.insert(0, str(installed))
    with pytest.raises(LoadError, match=r"RuntimeError: no \(mine/code\.py:3\)$"):
        load_backend("mine.code:Mine", import_folder)


def test_an_interrupt_of_an_import_stays_one(import_folder: Path) -> None:
    (import_folder / "mine.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_backend("mine:Mine", import_folder)


def test_an_entry_point_that_exits_is_an_error(import_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (import_folder / "mine.py").write_text("raise SystemExit('bye')\n")
    monkeypatch.syspath_prepend(import_folder)
    monkeypatch.setattr(loading, "entry_points", lambda group: [EntryPoint("one", "mine:Backend", group)])
    told = r"^backend 'one' \(mine:Backend\) does not import: it ended in SystemExit\('bye'\) \(mine\.py:1\)$"
    with pytest.raises(LoadError, match=told):
        load_backend("one", import_folder)


def test_a_constructor_that_exits_is_an_error(import_folder: Path) -> None:
    source = backend_source().replace("def __init__(self, runner): ...", "def __init__(self, runner): exit('bye')")
    (import_folder / "mine.py").write_text(source.replace("return object()", "raise SystemExit(4)"))
    backend = load_backend("mine:Mine", import_folder)
    with pytest.raises(LoadError, match=r"^mine:Mine: its construction does not return: it ended in SystemExit\('bye'"):
        backend.factory(None)  # type: ignore[arg-type]
    with pytest.raises(LoadError, match=r"^mine:Mine: its multi_step does not return: it ended in SystemExit\(4\)"):
        backend.factory.multi_step(None, num_steps=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "dotted"),
    [
        ("mine.py", "mine"),
        ("./mine", "mine"),
        ("./mine.py", "mine"),
        ("pkg/mine.py", "pkg.mine"),
        ("pkg/__init__.py", "pkg"),
        ("backends/pkg/mine.py", "pkg.mine"),
        ("../other/mine.py", "mine"),
        ("/elsewhere/mine.py", "mine"),
    ],
)
def test_a_path_instead_of_a_module_is_told_the_name_to_write(import_folder: Path, written: str, dotted: str) -> None:
    (import_folder / "mine.py").write_text("raise AssertionError('a path is not imported, not even its first part')\n")
    told = f"^backend '{written}:Mine': {written} is a path, .* write {dotted}:Mine, from the folder"
    with pytest.raises(LoadError, match=told):
        load_backend(f"{written}:Mine", import_folder)
    with pytest.raises(LoadError, match=r"write pkg\.mine:Mine, from the folder that has pkg in it"):
        load_backend(f"{import_folder}/pkg/mine.py:Mine", import_folder)


def test_several_installed_backends_need_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint(name, f"{name}_pkg:Backend", loading.BACKENDS) for name in ("one", "two")]
    monkeypatch.setattr(loading, "entry_points", lambda group: points)
    with pytest.raises(LoadError, match=r"choose one with --matrix-backend NAME .*one \(one_pkg:Backend\), two"):
        load_backend()


def test_one_name_twice_is_ambiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("one", f"{module}:Backend", loading.BACKENDS) for module in ("a", "b")]
    monkeypatch.setattr(loading, "entry_points", lambda group: points)
    with pytest.raises(LoadError, match="'one' is ambiguous: a:Backend, b:Backend"):
        load_backend("one")


def test_an_entry_point_that_does_not_import_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("one", "not_there:Backend", loading.BACKENDS)]
    monkeypatch.setattr(loading, "entry_points", lambda group: points)
    with pytest.raises(LoadError, match=r"backend 'one' \(not_there:Backend\) does not import: ModuleNotFoundError"):
        load_backend("one")


def test_the_installed_reference_satisfies_its_protocol() -> None:
    reference = load_reference()
    assert callable(reference.attend)
