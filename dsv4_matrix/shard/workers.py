"""What a worker is told before it imports anything: its place in the plan, its GPU, its kernel cache.

xdist sets the environment of a spec in the worker right after it starts, before pytest or torch are imported there, and
starts a replacement from the same spec: it comes up in the same place, on the same GPU.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsv4_matrix.shard.gpus import VISIBLE

#: Place of a worker in the plan, from 0; its replacements keep it.
PLACE = "DSV4_MATRIX_PLACE"
#: Folder in which a worker leaves what it collected, why it cannot run at all, and its stack if it sees its end coming.
NOTES = "DSV4_MATRIX_NOTES"
CACHE = "TRITON_CACHE_DIR"


def prepare(specs: Sequence[Any], gpus: Sequence[str], environ: Mapping[str, str], notes: Path) -> None:
    """Write the environment of each worker into its execnet spec.

    Args:
        specs: ``execnet.XSpec`` of each worker, in order.
        gpus: GPU of each worker, as ``shard.gpus.pin`` gives them; empty for workers without a GPU. A spec that names
            its own CUDA_VISIBLE_DEVICES, or runs on another machine, keeps what it has.
        environ: environment of this process.
        notes: folder for notes, on this machine.
    """
    for place, spec in enumerate(specs):
        spec.env[PLACE] = str(place)
        if spec.popen:
            spec.env[NOTES] = str(notes)
        if gpus and spec.popen and VISIBLE not in spec.env:
            spec.env[VISIBLE] = gpus[place]
            if len(specs) > 1:
                spec.env[CACHE] = str(cache_folder(environ, gpus, place))


def place_of(env: Mapping[str, str]) -> int:
    """Place in the plan of the worker whose spec has the environment ``env``. KeyError if it was not prepared."""
    return int(env[PLACE])


def note_path(notes: Path, worker: str) -> Path:
    """Where the worker with that xdist id (``gw3``; no two of a run share one) leaves its note."""
    return notes / f"{worker}.txt"


@dataclass(frozen=True)
class Found:
    """What a worker found when it had collected.

    Attributes:
        cases: the case that each collected test runs, by node id. A node id alone does not tell: a test of something
            else may have a case id among its parameters.
        machine: fields of the ``Machine`` that it runs them on; empty if it runs none.
        kernels: fields of each ``ServedCall`` of its backend there.
    """

    cases: Mapping[str, str]
    machine: Mapping[str, str] = field(default_factory=dict)
    kernels: Sequence[Mapping[str, str]] = ()


def write_found(notes: Path, worker: str, found: Found) -> None:
    """Leave ``found`` for the controller."""
    (notes / f"{worker}.json").write_text(json.dumps(asdict(found)), encoding="ascii")


def read_found(node: Any) -> Found | None:
    """What ``write_found`` left of ``node``, an xdist WorkerController; None if it runs on another machine."""
    notes = _notes_of(node)
    return None if notes is None else Found(**json.loads((notes / f"{node.gateway.id}.json").read_text("ascii")))


def write_refusal(notes: Path, worker: str, reason: str) -> None:
    """Leave why this worker cannot run anything: what the user has to mend."""
    (notes / f"{worker}.refusal").write_text(reason, encoding="utf-8")


def read_refusal(node: Any) -> str:
    """What ``write_refusal`` left of ``node``, an xdist WorkerController; empty if it left nothing."""
    notes = _notes_of(node)
    path = None if notes is None else notes / f"{node.gateway.id}.refusal"
    return path.read_text("utf-8") if path is not None and path.exists() else ""


def _notes_of(node: Any) -> Path | None:
    notes = node.gateway.spec.env.get(NOTES)
    return None if notes is None else Path(notes)


def cache_folder(environ: Mapping[str, str], gpus: Sequence[str], place: int) -> Path:
    """Compiled kernels of the worker at ``place``: a folder that no other worker of this run writes to.

    Named by GPU, so that runs on several GPUs of one machine do not meet in it either, and kept for the next run, in
    which the same cells come to the same worker. Lies inside the cache that the user has.
    """
    base = environ.get(CACHE) or str(Path(environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache")
    name = re.sub(r"[^\w.-]", "_", gpus[place])
    sharing = sum(gpu == gpus[place] for gpu in gpus[:place])
    return Path(base) / (f"dsv4-matrix-gpu-{name}" + (f"-{sharing + 1}" if sharing else ""))
