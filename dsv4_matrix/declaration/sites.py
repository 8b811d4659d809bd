"""Names of the call sites at which a probe may expect a refusal, known here without importing torch.

``dsv4_matrix.modes.probes`` implements exactly these; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

#: What each site does to the backend, one line each. The first eight serve cells, the rest edges outside the cells.
SITE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "capture-extend": "prepare the capture of a graph for an EXTEND batch",
        "replay-extend": "prepare the replay of a graph for an EXTEND batch",
        "draft-extend-compressed": "eager DRAFT_EXTEND metadata, then attention of a layer with ratio 4 or 128",
        "capture-draft-extend-compressed": "capture DRAFT_EXTEND, then attention of a layer with ratio 4 or 128",
        "tree-verify": "build the backend for tree verification (speculative_eagle_topk 2)",
        "multi-token-prediction-tree": "build the backend for the multi-token prediction tree (top-k 4)",
        "draft-runner-compressed": "build the multi-step draft backends for a layer with ratio 4 or 128",
        "draft-extend-runner-compressed": "build the draft-extend runner for a layer with ratio 4 or 128",
        "page-size": "build the backend with a page size other than 256",
        "head-dim": "build the backend with a head_dim other than 512",
        "swa-page-size": "build the backend with an SWA page size other than 256 or 128",
        "num-heads": "build the backend with a head count other than 16, 32, 64 or 128",
        "index-topk": "build the backend with a C4 selection width other than 512 or 1024",
        "context-parallel": "build the backend with a context-parallel size above 1",
        "unknown-ratio": "attention with a compress ratio other than 0, 4 or 128",
        "unsupported-forward-mode": "eager metadata for a forward mode without metadata of this model",
        "uneven-lengths": "eager DECODE metadata for a batch with fewer locations than requests",
        "beyond-context": "replay a graph for a request longer than req_to_token is wide",
        "graph-beyond-capture": "replay a graph with more requests than it was captured for",
        "attn-sink-missing": "attention without an attn_sink",
        "sink-dtype": "attention with an attn_sink that is not float32",
        "q-dtype": "attention with a query that is not bfloat16",
        "q-width": "attention with a query whose last dimension is not 512",
        "k-dtype": "store K rows that are not bfloat16",
        "selection-width": "write a C4 selection whose width is not index_topk",
        "extra-pool-of-ratio-0": "store compressed entries for ratio 0, which has no compressed pool",
    }
)
