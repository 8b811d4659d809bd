"""What a worker is told before it imports anything: its place in the plan, its GPU, its kernel cache.

xdist sets the environment of a spec in the worker right after it starts, before pytest or torch are imported there, and
starts a replacement from the same spec: it comes up in the same place, on the same GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv4_matrix.shard.gpus import VISIBLE
from dsv4_matrix.shard.notes import NOTES

#: Place of a worker in the plan, from 0; its replacements keep it.
PLACE = "DSV4_MATRIX_PLACE"
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


def cache_folder(environ: Mapping[str, str], gpus: Sequence[str], place: int) -> Path:
    """Compiled kernels of the worker at ``place``: a folder that no other worker of this run writes to.

    Named by GPU, so that runs on several GPUs of one machine do not meet in it either, and kept for the next run, in
    which the same cells come to the same worker. Lies inside the cache that the user has.
    """
    base = environ.get(CACHE) or str(Path(environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache")
    name = re.sub(r"[^\w.-]", "_", gpus[place])
    sharing = sum(gpu == gpus[place] for gpu in gpus[:place])
    return Path(base) / (f"dsv4-matrix-gpu-{name}" + (f"-{sharing + 1}" if sharing else ""))
