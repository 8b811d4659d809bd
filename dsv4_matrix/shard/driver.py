"""What the CUDA driver tells this process, asked without torch: its GPUs, and the CUDA that it serves.

The process that only hands out cases and collects results needs no more of a GPU than its name, and importing torch
takes seconds. Order and number are those that torch has, since the driver applies CUDA_VISIBLE_DEVICES itself.
"""

from __future__ import annotations

import ctypes
from typing import Any

_LIBRARY = "libcuda.so.1"
_NAME_BYTES = 256


def device_names(cuda_version: str, library: str = _LIBRARY) -> tuple[str, ...]:
    """Names of the GPUs that a process with this environment may use; empty where there is none.

    Args:
        cuda_version: ``13.0``, the CUDA that torch was built for. A driver of an older major version does not serve
            it, and then torch sees no GPU.
        library: of the driver.
    """
    try:
        served = served_cuda(library)
    except (OSError, RuntimeError):
        return ()
    driver: Any = ctypes.CDLL(library)
    number = ctypes.c_int()
    if served // 1000 < int(cuda_version.partition(".")[0]):
        return ()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number)):
        return ()
    names = []
    for ordinal in range(number.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES)
        if driver.cuDeviceGet(ctypes.byref(device), ordinal) or driver.cuDeviceGetName(name, _NAME_BYTES, device):
            return ()
        names.append(name.value.decode("utf-8", "replace"))
    return tuple(names)


def served_cuda(library: str = _LIBRARY) -> int:
    """``13000``: the newest CUDA that the driver serves, 1000 x major + 10 x minor.

    OSError if there is no driver, RuntimeError if it does not answer.
    """
    version = ctypes.c_int()
    status = ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(version))
    if status != 0:
        raise RuntimeError(f"cuDriverGetVersion: CUDA error {status}")
    return version.value
