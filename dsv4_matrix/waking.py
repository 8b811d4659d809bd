"""Creates the device's context while tests are collected: otherwise the first case waits for it, half a second.

A process has one context, so this module keeps the one thread that creates it. It must have ended before a case runs: a
graph capture fails if another thread allocates.
"""

from __future__ import annotations

import threading

_thread: threading.Thread | None = None


def begin(torch_device: str) -> None:
    """Start creating the context of ``torch_device``, once a process; nothing for a CPU. Needs torch."""
    global _thread
    if torch_device != "cuda" or _thread is not None:
        return
    _thread = threading.Thread(target=_wake, args=(torch_device,), name="dsv4-matrix-waking", daemon=True)
    _thread.start()


def finish() -> None:
    """Wait until the context is there; at once if nobody has begun."""
    if _thread is not None:
        _thread.join()


def _wake(torch_device: str) -> None:
    """One fp64 product, as the judge's: it loads the library of matrix products too."""
    import torch

    try:
        one = torch.ones(1, 1, 1, dtype=torch.float64, device=torch_device)
        torch.bmm(one, one)
        torch.cuda.synchronize()
    except Exception:
        return  # the first case meets the same error, and there it is recorded
