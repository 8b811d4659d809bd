"""The shape of matrix.yaml, once: the loader reads by it and the editors' JSON Schema is made from it."""

from __future__ import annotations

from dsv4_matrix.declaration.drives import DRIVES, FORWARDS
from dsv4_matrix.declaration.grammar import Flag, Key, Known, ListOf, Number, Record, Table, Text, Whole
from dsv4_matrix.declaration.model import Level, State
from dsv4_matrix.declaration.sites import CALL_SITES, RATIOS

MAX_TOKENS = 1 << 20
MAX_REQUESTS = 256
EXCEPTIONS = ("AssertionError", "NotImplementedError", "RuntimeError", "TypeError", "ValueError")

NAME = Text("a name of a-z, 0-9 and single hyphens, at most 60 characters", r"(?=.{1,60}$)[a-z0-9]+(?:-[a-z0-9]+)*")
CELL_NAME = Text("a cell name such as r4/cg-decode", r"r(?:0|[1-9][0-9]{0,5})/[a-z0-9]+(?:-[a-z0-9]+)*")
#: No line ends and no control characters: texts end up in tables and on terminals.
PRINTED = r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]"
SENTENCE = Text("a sentence on one line, 10 to 300 characters", rf"(?={PRINTED}{{10,300}}$)\S.*\S")

LENGTHS = ListOf(Whole(0, MAX_TOKENS), 0, MAX_REQUESTS)
ROWS = ListOf(Whole(1, MAX_TOKENS), 0, MAX_REQUESTS)

VARIANT = Record(
    "a variant",
    {
        "name": Key(NAME, "unique in its cell; part of the case id", required=True),
        "forward": Key(Text(choices=FORWARDS), "how rows expand; needed only where the mode runs more than one"),
        "prefix_lens": Key(
            LENGTHS, "committed tokens of each request before the step; a decode sees one more", required=True
        ),
        "extend_lens": Key(ROWS, "rows of each request; left out for decode, which has one each"),
        "accept_lens": Key(ROWS, "verify: rows that each request keeps before a following decode step"),
        "reuse": Key(
            Text(choices=("next-step", "freed")),
            "verify: whether the next step or another request takes rejected slots",
        ),
        "replays": Key(
            ListOf(LENGTHS, 0, 64),
            "graphs: prefix lengths of three or more further batches, two with requests; an empty one is an idle rank",
        ),
        "bucket": Key(
            Whole(1, MAX_REQUESTS), "graphs: requests that the graph is captured for; the largest batch if absent"
        ),
        "num_steps": Key(Whole(2, 5), "draft runner: N steps are N - 1 attention forwards"),
        "heads": Key(Whole(choices=(16, 32, 64, 128)), "query heads"),
        "sink": Key(Text(choices=("off", "zero", "per-head")), "off is -1e30, per-head are distinct finite values"),
        "swa_page_size": Key(Whole(choices=(256, 128)), "slots a page of the SWA pool"),
        "index_topk": Key(Whole(choices=(512, 1024)), "width of the C4 selection"),
        "pages": Key(Text(choices=("shuffled", "interleaved", "reversed", "identity")), "order of physical pages"),
        "history": Key(Text(choices=("full", "window")), "window leaves poisoned what the window no longer needs"),
        "q_layout": Key(Text(choices=("contiguous", "strided")), "strided is a slice of a wider tensor"),
        "gpu_only_lens": Key(Flag(), "no length is handed over on the host, and none may be copied there"),
        "large_pool": Key(Flag(), "a pool above 2 GiB; GPU only, one at a time"),
        "devices": Key(ListOf(Text(choices=("cpu", "gpu")), 1, 2, unique=True), "where the variant runs"),
        "cost": Key(Whole(1, 1_000_000), "shard weight in row-blocks; computed from the lengths if absent"),
    },
)

PROBE = Record(
    "a probe",
    {
        "site": Key(Text(choices=tuple(CALL_SITES)), "the call site that refuses", required=True),
        "raises": Key(Text(choices=EXCEPTIONS), "the exception type, matched exactly", required=True),
        "match": Key(
            Text("a regular expression of 3 to 200 characters", rf"(?={PRINTED}{{3,200}}$)\S.*\S"),
            "searched in the message; spells out what is refused",
            required=True,
        ),
    },
)

AGREEMENT = Record(
    "an agreement",
    {
        "bitwise": Key(Known(), "whether every length has the bits of decode", required=True),
        "first_divergent_kv_len": Key(Whole(1, MAX_TOKENS), "not bitwise: rows of fewer tokens do have them"),
    },
)

CELL = Record(
    "a cell",
    {
        "state": Key(Text(choices=tuple(State)), "what the cell claims", required=True),
        "profiles": Key(ListOf(NAME, 1, 16, unique=True), "covered: named lists of variants to run"),
        "variants": Key(ListOf(VARIANT, 1, 128), "covered: the cell's own variants"),
        "promise": Key(Text(choices=tuple(Level)), "covered: strongest level of determinism, L0 (same plan) if absent"),
        "prefill_decode_bitwise": Key(
            Record(
                "the prefill-paths",
                {
                    "dense": Key(AGREEMENT, "the kernel that decode runs"),
                    "sparse": Key(AGREEMENT, "over a dequantised workspace"),
                },
            ),
            "eager: whether a prefill has the bits of single decodes over the same cache bytes",
        ),
        "reason": Key(SENTENCE, "not covered: why, in words of its own"),
        "probe": Key(PROBE, "not covered: the refusal that the generated test asserts"),
    },
    when={
        "if": {"properties": {"state": {"const": State.COVERED.value}}},
        "then": {
            "anyOf": [{"required": ["profiles"]}, {"required": ["variants"]}],
            "properties": {"reason": False, "probe": False},
        },
        "else": {
            "required": ["reason", "probe"],
            "properties": dict.fromkeys(("profiles", "variants", "promise", "prefill_decode_bitwise"), False),
        },
    },
)

REFUSAL = Record(
    "a refusal",
    {
        "reason": Key(SENTENCE, "why the backend refuses", required=True),
        "probe": Key(PROBE, "the refusal that the generated test asserts", required=True),
    },
)

GEOMETRY = Record(
    "the geometry",
    {
        "page_size": Key(Whole(choices=(256,)), "tokens a page", required=True),
        "head_dim": Key(Whole(1, 4096), "elements of a key, nope + rope", required=True),
        "nope": Key(Whole(64, 4096), "elements stored as FP8", required=True),
        "rope": Key(Whole(1, 4096), "elements stored as BF16", required=True),
        "window": Key(Whole(1, 4096), "keys of the sliding window", required=True),
        "bytes_per_token": Key(
            Whole(1, 65536), "nope + 2 * rope + a scale byte a group and padding to 8", required=True
        ),
    },
)

TOLERANCE = Record(
    "a tolerance",
    {
        "atol": Key(Number(1.0), "absolute", required=True),
        "rtol": Key(Number(1.0), "relative to the wanted value", required=True),
    },
)

BUDGET = Record(
    "the budget",
    {
        "baseline_factor": Key(Number(16.0), "times the error of the low-precision baseline", required=True),
        "rounding": Key(Number(1024.0), "times bf16 epsilon times the largest wanted value", required=True),
        "mean_rounding": Key(Number(1024.0), "the same for the mean error", required=True),
        "cosine": Key(Number(1.0), "largest 1 - cosine", required=True),
        "lse_factor": Key(Number(16.0), "times the baseline's error in log-sum-exp", required=True),
        "lse_rounding": Key(Number(65536.0), "times fp32 epsilon times max(1, |lse|)", required=True),
    },
)

MODE = Record(
    "a mode",
    {
        "title": Key(
            Text("a title of at most 40 characters", rf"(?={PRINTED}{{1,40}}$)[^|`<>\s](?:[^|`<>]*[^|`<>\s])?"),
            "column of the table",
            required=True,
        ),
        "summary": Key(SENTENCE, "how its cases are run", required=True),
    },
)

FILE = Record(
    "the matrix",
    {
        "schema": Key(Whole(choices=(1,)), "version of this layout", required=True),
        "geometry": Key(GEOMETRY, "numbers of the packed cache", required=True),
        "tolerances": Key(
            Record(
                "the tolerances",
                {
                    "eager": Key(TOLERANCE, "outer contract of eager steps", required=True),
                    "graph": Key(TOLERANCE, "outer contract of graph replays", required=True),
                    "budget": Key(BUDGET, "how the tight budget is formed from data", required=True),
                },
            ),
            "the outer contract and what is held inside it",
            required=True,
        ),
        "ratios": Key(ListOf(Whole(choices=RATIOS), 1, 3, unique=True), "rows of the table", required=True),
        "modes": Key(Table("modes", Text(choices=tuple(DRIVES)), MODE), "columns of the table", required=True),
        "profiles": Key(Table("profiles", NAME, ListOf(VARIANT, 1, 128)), "lists of variants that cells share"),
        "cells": Key(Table("cells", CELL_NAME, CELL), "every ratio x mode once", required=True),
        "refusals": Key(Table("refusals", NAME, REFUSAL), "hard edges outside the cells", required=True),
    },
)
