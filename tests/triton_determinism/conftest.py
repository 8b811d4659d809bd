"""Kernels on the GPU if there is one, else through the interpreter; known answers shared with the reference's tests."""

from __future__ import annotations

import json
import os
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device():
    return "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"


@pytest.fixture
def generator(request):
    return np.random.default_rng(crc32(request.node.name.encode()))


@pytest.fixture(scope="session")
def vectors():
    path = Path(__file__).parents[1] / "determinism" / "vectors.json"
    return json.loads(path.read_text())


@pytest.fixture
def worked(vectors):
    """fp32 target ``[1, 4, 8]`` and draft ``[1, 3, 8]`` of the worked rows."""
    target = np.array(vectors["target_16ths"], dtype=np.float32)[None] / np.float32(16)
    draft = np.array(vectors["draft_16ths"], dtype=np.float32)[None] / np.float32(16)
    return target, draft
