"""The shapes that are measured, and the peer's medians on them, both from one data file with its provenance."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Shape:
    """One call of sparse decode attention.

    Attributes:
        ratio: compression of the extra list, 0 without one.
        heads: query heads.
        batch, s_q: requests, and query rows of each.
        topk, page: width of the main list and entries a page of its cache.
        extra_topk, extra_page: of the extra list; 0 without one.
        extra_lengths: whether the call states the extra list's lengths, or leaves them to its width.
        extra_slots: slots a request in the extra list's cache; 0 leaves it to the benchmark's standard (``inputs``).
        shared: whether all requests choose from one request's slots, as the rows of a long prompt do.
    """

    ratio: int
    heads: int
    batch: int
    s_q: int
    topk: int
    page: int
    extra_topk: int
    extra_page: int
    extra_lengths: bool = False
    shared: bool = False
    extra_slots: int = 0

    @property
    def name(self) -> str:
        """``c4-h64-k640-b256-q2``: ratio (``swa`` without an extra list), heads, keys a row, batch, rows a request."""
        kind = f"c{self.ratio}" if self.ratio else "swa"
        return f"{kind}-h{self.heads}-k{self.keys}-b{self.batch}-q{self.s_q}"

    @property
    def rows(self) -> int:
        return self.batch * self.s_q

    @property
    def keys(self) -> int:
        """Keys of a row, both lists full."""
        return self.topk + self.extra_topk


@dataclass(frozen=True)
class PeerTable:
    """Medians of another kernel.

    Attributes:
        kernel, gpu, measured: what was measured, on which GPU (its ``torch.cuda.get_device_name``), when.
        microseconds: by shape, in the file's order.
    """

    kernel: str
    gpu: str
    measured: str
    microseconds: dict[Shape, float]


def peer_table() -> PeerTable:
    """FlashMLA on an H200: 41 shapes, see ``flashmla_h200.json`` for how they were taken."""
    text = files("dsv4_matrix.bench").joinpath("flashmla_h200.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    times = {}
    for row in table["rows"]:
        values = dict(zip(table["columns"], row, strict=True))
        microseconds = values.pop("us")
        times[Shape(**values)] = float(microseconds)
    return PeerTable(table["kernel"], table["gpu"], table["measured"], times)


#: tokens of a long context
LONG = 2**20


def long_shapes() -> list[Shape]:
    """A context of 1M tokens, and 8192 rows of one prompt, at 64 heads.

    Decode: C128 has 8192 entries a row, and its lists grow by factors of two up to that; C4 selects 1024 of the 262,144
    entries of its request. One request shows what a list costs by itself, 64 and 256 what a key costs on a busy device.
    Prompt: the rows share one request's cache, and select 512 or 1024 entries of either ratio.
    """
    decode = [
        Shape(128, 64, batch, 1, 128, 256, extra, 2, True)
        for batch in (1, 64, 256)
        for extra in (1024, 2048, 4096, 8192)
    ]
    decode += [
        Shape(4, 64, batch, 1, 128, 256, extra, 64, True, extra_slots=LONG // 4)
        for batch in (1, 64)
        for extra in (512, 1024)
    ]
    prompt = [
        Shape(ratio, 64, 8192, 1, 128, 256, extra, page, True, True)
        for ratio, page in ((128, 2), (4, 64))
        for extra in (512, 1024)
    ]
    return decode + prompt


class NoSuchShapeError(ValueError):
    """A selection that no shape matches."""


def select(shapes: list[Shape], expression: str | None) -> list[Shape]:
    """The shapes whose names match one of the comma-separated fnmatch patterns; all of them without an expression.

    Raises NoSuchShapeError naming a pattern that matches nothing.
    """
    if expression is None:
        return shapes
    patterns = [pattern.strip() for pattern in expression.split(",") if pattern.strip()]
    for pattern in patterns:
        if not any(fnmatch(shape.name, pattern) for shape in shapes):
            names = ", ".join(shape.name for shape in shapes)
            raise NoSuchShapeError(f"no shape matches {pattern!r}; there are {names}")
    return [shape for shape in shapes if any(fnmatch(shape.name, pattern) for pattern in patterns)]
