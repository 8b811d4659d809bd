"""Named random streams of a case: every draw has a stream of its own, so that adding one moves no other."""

from __future__ import annotations

from zlib import crc32

import numpy as np


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """A generator that depends on the case's seed and the names only: not on process, order, device or torch."""
    return np.random.default_rng([seed, crc32("/".join(map(str, names)).encode())])
