"""Which GPUs this process may use, without importing torch, and which of them a worker is pinned to.

A worker's GPU is an entry of the caller's own CUDA_VISIBLE_DEVICES list: counting from zero instead would take GPUs
that the caller left to somebody else. Entries are numbers, UUIDs or MIG ids and are passed on as they stand.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"

_ENTRY = re.compile(r"[0-9]+|(GPU|MIG)-[\w./-]+", re.ASCII)
_LISTED = re.compile(r"UUID: (GPU-[^\s)]+|MIG-[^\s)]+)")


class GpuListError(ValueError):
    """A CUDA_VISIBLE_DEVICES that no worker can be pinned by, or more workers than GPUs without being asked for."""


def nvidia_smi() -> str:
    """What ``nvidia-smi -L`` prints; empty where there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def visible_gpus(environ: Mapping[str, str], listing: Callable[[], str] = nvidia_smi) -> tuple[str, ...]:
    """Entries for CUDA_VISIBLE_DEVICES, one a GPU that a process with ``environ`` may use; empty if there is none.

    With the variable set, its own entries, up to the first that CUDA does not accept (``-1`` hides what follows). Else
    all GPUs of the machine by UUID, since ``nvidia-smi`` and CUDA need not count in the same order; of a GPU that is
    divided, its MIG instances.

    Raises:
        GpuListError: an entry occurs twice, with which CUDA shows no GPU at all.
    """
    asked = environ.get(VISIBLE)
    if asked is None:
        return _all(listing())
    entries: list[str] = []
    for text in asked.split(","):
        entry = text.strip()
        if not _ENTRY.fullmatch(entry):
            break
        if entry in entries:
            raise GpuListError(f"{VISIBLE}={asked!r} names {entry} twice, and CUDA then shows no GPU; name each once")
        entries.append(entry)
    return tuple(entries)


def _all(listing: str) -> tuple[str, ...]:
    gpus: list[list[str]] = []  # a GPU, then its MIG instances
    for line in listing.splitlines():
        if (found := _LISTED.search(line)) is None:
            continue
        if found.group(1).startswith("MIG-") and gpus:
            gpus[-1].append(found.group(1))
        else:
            gpus.append([found.group(1)])
    return tuple(entry for gpu in gpus for entry in (gpu[1:] or gpu))


def pin(workers: int, gpus: Sequence[str], *, share: bool = False) -> tuple[str, ...]:
    """The GPU of each worker: worker ``k`` has entry ``k``, and starts again at the first where GPUs are shared.

    Raises:
        GpuListError: there is no GPU, or there are more workers than GPUs and ``share`` is False.
    """
    if not gpus:
        raise GpuListError(f"there is no GPU to pin {workers} workers to; see nvidia-smi and {VISIBLE}")
    if workers > len(gpus) and not share:
        raise GpuListError(
            f"{workers} workers for {len(gpus)} GPUs ({', '.join(gpus)}); give -n {len(gpus)} or -n auto, or ask for "
            f"sharing: several workers of one GPU disturb each other's memory"
        )
    return tuple(gpus[worker % len(gpus)] for worker in range(workers))
