"""The GPUs that the CUDA driver shows to this process, asked without torch, whose import takes seconds.

The process that only hands out cases and collects results needs no more of a GPU than its name. Order and number are
those that torch has, since the driver applies CUDA_VISIBLE_DEVICES itself.
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
        driver: Any = ctypes.CDLL(library)
    except OSError:
        return ()
    number = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDriverGetVersion(ctypes.byref(number)):
        return ()
    if number.value // 1000 < int(cuda_version.partition(".")[0]) or driver.cuDeviceGetCount(ctypes.byref(number)):
        return ()
    names = []
    for ordinal in range(number.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES)
        if driver.cuDeviceGet(ctypes.byref(device), ordinal) or driver.cuDeviceGetName(name, _NAME_BYTES, device):
            return ()
        names.append(name.value.decode("utf-8", "replace"))
    return tuple(names)
