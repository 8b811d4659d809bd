"""The call sites at which a probe may expect a refusal, and the cells that each can speak for, without importing torch.

``dsv4_matrix.modes`` implements exactly these; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

COMPRESSED = (4, 128)
RATIOS = (0, *COMPRESSED)

#: The site of any cell that has none of its own.
OWN_STEP = "own-step"
#: Modes that the harness can drive, so that the step of their cells can be tried.
DRIVEN = (
    "eager",
    "cg-decode",
    "verify-eager",
    "verify-cg",
    "de-eager",
    "de-cg",
    "eagle-draft-runner",
    "eagle-de-runner",
)
#: Every probe ends with a small eager decode of ratio 0, to see that the backend still serves: it cannot be refused.
SERVED = (0, "eager")


@dataclass(frozen=True)
class CallSite:
    """A call site.

    Attributes:
        does: what it does to the backend, in one line.
        cells: ``(ratio, mode)`` of the cells whose refusal it shows; empty for an edge outside the cells.
    """

    does: str
    cells: frozenset[tuple[int, str]] = frozenset()


def _cells(*modes: str, ratios: tuple[int, ...] = RATIOS) -> frozenset[tuple[int, str]]:
    return frozenset(product(ratios, modes))


#: By the name that matrix.yaml uses: first what serves cells, then the edges outside them.
CALL_SITES: Mapping[str, CallSite] = MappingProxyType(
    {
        OWN_STEP: CallSite("the cell's own step, eager or captured as its mode is", _cells(*DRIVEN) - {SERVED}),
        "capture-extend": CallSite(
            "prepare the capture of a graph for an EXTEND batch", _cells("pcg-extend", "bcg-extend")
        ),
        "replay-extend": CallSite(
            "prepare the replay of a graph for an EXTEND batch", _cells("pcg-extend", "bcg-extend")
        ),
        "draft-extend-compressed": CallSite(
            "eager DRAFT_EXTEND metadata, then attention of a layer with ratio 4 or 128",
            _cells("de-eager", ratios=COMPRESSED),
        ),
        "capture-draft-extend-compressed": CallSite(
            "capture DRAFT_EXTEND, then attention of a layer with ratio 4 or 128",
            _cells("de-cg", ratios=COMPRESSED),
        ),
        "tree-verify": CallSite(
            "build the backend for tree verification (speculative_eagle_topk 2)", _cells("de-v2-cg")
        ),
        "multi-token-prediction-tree": CallSite(
            "build the backend for the multi-token prediction tree (top-k 4)", _cells("fkvmtp-runner")
        ),
        "draft-runner-compressed": CallSite(
            "build the multi-step draft backends for a layer with ratio 4 or 128",
            _cells("eagle-draft-runner", ratios=COMPRESSED),
        ),
        "draft-extend-runner-compressed": CallSite(
            "build the draft-extend runner for a layer with ratio 4 or 128",
            _cells("eagle-de-runner", ratios=COMPRESSED),
        ),
        "page-size": CallSite("build the backend with a page size other than 256"),
        "head-dim": CallSite("build the backend with a head_dim other than 512"),
        "swa-page-size": CallSite("build the backend with an SWA page size other than 256 or 128"),
        "num-heads": CallSite("build the backend with a head count other than 16, 32, 64 or 128"),
        "index-topk": CallSite("build the backend with a C4 selection width other than 512 or 1024"),
        "context-parallel": CallSite("build the backend with a context-parallel size above 1"),
        "unknown-ratio": CallSite("attention with a compress ratio other than 0, 4 or 128"),
        "unsupported-forward-mode": CallSite("eager metadata for a forward mode without metadata of this model"),
        "uneven-lengths": CallSite("eager DECODE metadata for a batch with fewer locations than requests"),
        "beyond-context": CallSite("replay a graph for a request longer than req_to_token is wide"),
        "graph-beyond-capture": CallSite("replay a graph with more requests than it was captured for"),
        "attn-sink-missing": CallSite("attention without an attn_sink"),
        "sink-dtype": CallSite("attention with an attn_sink that is not float32"),
        "q-dtype": CallSite("attention with a query that is not bfloat16"),
        "q-width": CallSite("attention with a query whose last dimension is not 512"),
        "k-dtype": CallSite("store K rows that are not bfloat16"),
        "selection-width": CallSite("write a C4 selection whose width is not index_topk"),
        "extra-pool-of-ratio-0": CallSite("store compressed entries for ratio 0, which has no compressed pool"),
    }
)


def sites_of_cell(ratio: int, mode: str) -> tuple[str, ...]:
    """Names of the sites that can speak for ``r<ratio>/<mode>``; () for the one cell that every probe needs."""
    return tuple(name for name, site in CALL_SITES.items() if (ratio, mode) in site.cells)


def sites_outside_cells() -> tuple[str, ...]:
    """Names of the sites that speak for no cell, for ``refusals``."""
    return tuple(name for name, site in CALL_SITES.items() if not site.cells)
