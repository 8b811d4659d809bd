"""What can go wrong while a backend is driven, as exceptions that name the actor and the place."""

from __future__ import annotations

import traceback
from pathlib import Path

_HERE = str(Path(__file__).parent)


class HostSyncError(RuntimeError):
    """The backend waited for the device, or read from it, where a graph is captured or lengths are GPU-only."""


class BackendError(RuntimeError):
    """The backend raised. ``str()`` is one screen: where the case was, the exception, the backend's last frames."""

    def __init__(self, place: str, error: BaseException) -> None:
        self.place = place
        self.error = error
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith(_HERE)] or list(frames)
        lines = [f"  {_place(frame)}: {frame.line}" for frame in own[-4:]]
        super().__init__("\n".join([f"backend raised in {place}: {type(error).__name__}: {error}", *lines]))


def caller_outside_harness() -> str:
    """``package/file.py:line in function`` of the innermost frame that is neither this package's nor torch's."""
    for frame in reversed(traceback.extract_stack()[:-1]):
        if not frame.filename.startswith(_HERE) and "/torch/" not in frame.filename:
            return _place(frame)
    return "an unknown place"


def _place(frame: traceback.FrameSummary) -> str:
    """``package/module.py:12 in function``: messages end up in reports, which hold no machine's paths."""
    return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} in {frame.name}"
