"""What this machine runs cases on: its GPU, or Triton's interpreter on the CPU."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Machine:
    """Where cases run.

    Attributes:
        kind: ``gpu`` or ``cpu``, as ``devices`` in matrix.yaml names it.
        torch_device: ``cuda`` or ``cpu``.
        model: ``NVIDIA H200`` or ``CPU interpreter``; goes into the report's header.
        torch: version.
        triton: version, empty where it is not installed.
    """

    kind: str
    torch_device: str
    model: str
    torch: str
    triton: str

    @property
    def slug(self) -> str:
        """``nvidia-h200``: the file name of this device's evidence."""
        return slug(self.model)


def find_machine() -> Machine:
    """The GPU that torch sees, else the CPU; imports torch.

    Without a GPU this sets TRITON_INTERPRET=1, so call it before a backend is imported: Triton reads the variable when
    a kernel is defined. TRITON_INTERPRET=1 set by the user asks for the interpreter, also where there is a GPU.

    torch is set to one thread, for this process, on a GPU as well, and numpy's BLAS too unless the user or an earlier
    import of numpy decided otherwise. CPU sums differ between one thread and two, and a result may not depend on the
    host. Inputs are drawn on the CPU, and threads of several workers on the same cores wait for each other at the end
    of every operation: that slows the interpreter down fivefold.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy is loaded, which importing torch does
    import torch

    torch.set_num_threads(1)
    version = str(torch.__version__)
    if torch.cuda.is_available() and not _interpreted():
        return _gpu(torch.cuda.get_device_name(0), version)
    os.environ["TRITON_INTERPRET"] = "1"
    return _cpu(version)


def foresee_machine() -> Machine:
    """What ``find_machine`` finds in a process that runs cases, without importing torch where that can be had.

    For a process that runs none itself. Each worker tells what it found, and the two are compared.
    """
    build = _torch_build()
    if build is None:
        return find_machine()
    names = () if _interpreted() else _driver_names(build)
    return _gpu(names[0], build.version) if names else _cpu(build.version)


def slug(model: str) -> str:
    """``NVIDIA H200`` as a file name: ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")


def gpus() -> tuple[str, ...]:
    """Entries for CUDA_VISIBLE_DEVICES, one a GPU that this process may use. GpuListError for a wrong list.

    The caller's own entries, or those of ``nvidia-smi``; CUDA has the last word about how many there are.
    """
    from dsv4_matrix.shard.gpus import VISIBLE, visible_gpus

    count = len(_names())
    found = visible_gpus(os.environ)
    if VISIBLE in os.environ or len(found) == count:
        return found[:count]
    return tuple(str(number) for number in range(count))


def models(count: int) -> tuple[str, ...]:
    """Names of the first ``count`` GPUs that this process may use."""
    return _names()[:count]


def worker_count() -> int:
    """What ``-n auto`` means: one worker a visible GPU, or the CPUs that this process may use."""
    from dsv4_matrix.shard.gpus import VISIBLE

    if foresee_machine().kind == "gpu":
        return len(gpus() if VISIBLE in os.environ else _names())
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class _Build:
    """Of the torch that is installed: its version, and the CUDA that it was built for, empty for none."""

    version: str
    cuda: str


def _torch_build() -> _Build | None:
    """From torch's own file of versions; None where torch has to be asked: it is loaded, absent, or built for ROCm.

    The version in the package's metadata lacks the ``+cu130`` that a report's header has.
    """
    if "torch" in sys.modules or (spec := importlib.util.find_spec("torch")) is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name("version.py")
    try:
        told: dict[str, Any] = runpy.run_path(str(path))
    except OSError:
        return None
    version, cuda = told.get("__version__"), told.get("cuda")
    if not isinstance(version, str) or told.get("hip") or told.get("xpu"):
        return None
    return _Build(version, cuda if isinstance(cuda, str) else "")


def _driver_names(build: _Build) -> tuple[str, ...]:
    from dsv4_matrix.shard.driver import device_names

    return device_names(build.cuda) if build.cuda else ()


def _names() -> tuple[str, ...]:
    """Names of all GPUs that this process may use, in CUDA's order."""
    if (build := _torch_build()) is not None:
        return _driver_names(build)
    import torch

    return tuple(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _gpu(model: str, torch_version: str) -> Machine:
    return Machine("gpu", "cuda", model, torch_version, _version("triton"))


def _cpu(torch_version: str) -> Machine:
    return Machine("cpu", "cpu", "CPU interpreter", torch_version, _version("triton"))


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""
