"""Speed: a FlashMLA-compatible attention function and a backend's steps on this GPU, against floors and a peer's table.

A benchmark, never a test: nothing here passes or fails by a time.
"""

from __future__ import annotations
