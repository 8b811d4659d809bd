"""What this machine runs cases on: its GPU, or Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass


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
    a kernel is defined. TRITON_INTERPRET=1 set by the user asks for the interpreter, also where there is a GPU. On the
    CPU torch is set to one thread, for this process, and numpy's BLAS too unless the user or an earlier import of
    numpy decided otherwise: workers that each start a thread a core slow the interpreter down fivefold.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy is loaded, which importing torch does
    import torch

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if torch.cuda.is_available() and not interpreted:
        return Machine("gpu", "cuda", torch.cuda.get_device_name(0), torch.__version__, _version("triton"))
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)  # CPU sums differ between one thread and two; a result may not depend on the host
    return Machine("cpu", "cpu", "CPU interpreter", torch.__version__, _version("triton"))


def slug(model: str) -> str:
    """``NVIDIA H200`` as a file name: ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")


def gpus() -> tuple[str, ...]:
    """Entries for CUDA_VISIBLE_DEVICES, one a GPU that torch sees in this process. GpuListError for a wrong list.

    The caller's own entries, or those of the driver; torch has the last word about how many there are.
    """
    import torch

    from dsv4_matrix.shard.gpus import VISIBLE, visible_gpus

    count = torch.cuda.device_count()
    found = visible_gpus(os.environ)
    if VISIBLE in os.environ or len(found) == count:
        return found[:count]
    return tuple(str(number) for number in range(count))


def models(count: int) -> tuple[str, ...]:
    """Names of the first ``count`` GPUs that torch sees."""
    import torch

    return tuple(torch.cuda.get_device_name(number) for number in range(min(count, torch.cuda.device_count())))


def worker_count() -> int:
    """What ``-n auto`` means: one worker a visible GPU, or the CPUs that this process may use."""
    if find_machine().kind == "gpu":
        return len(gpus())
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""
