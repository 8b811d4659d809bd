"""Rules between keys: a covered cell can be driven, a variant's lengths fit its mode, a probe is about its cell."""

from __future__ import annotations

from dsv4_matrix.declaration.drives import DRIVES
from dsv4_matrix.declaration.grammar import Fields
from dsv4_matrix.declaration.layout import MAX_TOKENS
from dsv4_matrix.declaration.mistakes import Mistakes, join
from dsv4_matrix.declaration.model import Variant
from dsv4_matrix.declaration.sites import DRIVEN, sites_of_cell, sites_outside_cells

#: Contract: a captured graph is replayed at least so often, with other batches.
LEAST_REPLAYS = 3
#: Of these, so many have requests: an idle one computes nothing, and of two, one follows a batch that is not the
#: case's own, which is replayed first and last.
LEAST_LIVE = 2
#: Verify chains: the root and at least one draft, at most eight rows.
DRAFT_TOKENS = range(2, 9)


def check_driver(ratio: int, mode: str, fields: Fields, mistakes: Mistakes) -> None:
    """Add a mistake if the harness has no driver for ``mode``, of the covered cell ``fields``: it could not run."""
    if mode not in DRIVEN:
        found = f"r{ratio}/{mode} covered, whose mode has no driver"
        allowed = f"covered only under {join(DRIVEN)}; docs/declaration.md says what a driver takes"
        mistakes.add(fields.place("state"), found, allowed)


def check_site(ratio: int, mode: str, site: str, fields: Fields, mistakes: Mistakes) -> None:
    """Add a mistake if ``site``, of the probe ``fields``, is about something else than ``r<ratio>/<mode>``.

    Such a probe would pass whatever becomes of the cell.
    """
    own = sites_of_cell(ratio, mode)
    if site not in own:
        allowed = join(own) or "state: covered, for every probe ends with a decode of this cell"
        mistakes.add(fields.place("site"), f"site {site}, which says nothing about r{ratio}/{mode}", allowed)


def check_site_outside_cells(site: str, fields: Fields, mistakes: Mistakes) -> None:
    """Add a mistake if ``site``, of a probe under ``refusals``, needs a cell to speak for."""
    outside = sites_outside_cells()
    if site not in outside:
        mistakes.add(fields.place("site"), f"site {site}, which speaks for cells, under refusals", join(outside))


def check_variant(ratio: int, mode: str, variant: Variant, fields: Fields, mistakes: Mistakes) -> None:
    """Add a mistake for everything about ``variant`` that cannot run in ``r<ratio>/<mode>``."""
    rule = _Rule(mode, variant, fields, mistakes)
    rule.rows()
    rule.accepted()
    rule.graph()
    rule.steps()
    rule.options(ratio)


class _Rule:
    def __init__(self, mode: str, variant: Variant, fields: Fields, mistakes: Mistakes) -> None:
        self.mode = mode
        self.drive = DRIVES[mode]
        self.variant = variant
        self.fields = fields
        self.mistakes = mistakes

    def add(self, key: str, found: str, allowed: str, index: int | None = None) -> None:
        self.mistakes.add(self.fields.place(key, index), f"{found} in variant {self.variant.name}", allowed)

    def unread(self, key: str, reader: str) -> None:
        if key in self.fields.values:
            self.add(key, f"{key}, which {self.mode} does not read,", f"{key} only in {reader}")

    def rows(self) -> None:
        variant, requests = self.variant, len(self.variant.prefix_lens)
        if variant.forward == "decode":
            if variant.extend_lens:
                self.add("extend_lens", "extend_lens for a decode", "no extend_lens: a decode has one row a request")
            return
        if len(variant.extend_lens) != requests:
            found = f"{len(variant.extend_lens)} extend_lens for {requests} prefix_lens"
            self.add("extend_lens", found, "one of each for every request")
            return
        if variant.forward == "target-verify":
            for index, rows in enumerate(variant.extend_lens):
                if rows not in DRAFT_TOKENS:
                    self.add("extend_lens", f"{rows} draft tokens", "2 to 8 draft tokens a request", index)
        if self.drive.uniform and len(set(variant.extend_lens)) > 1:
            self.add("extend_lens", f"different extend_lens under {self.mode}", "the same for every request of a graph")
        for index, (prefix, rows) in enumerate(zip(variant.prefix_lens, variant.extend_lens, strict=True)):
            if prefix + rows > MAX_TOKENS:
                self.add("extend_lens", f"{prefix} + {rows} tokens", f"at most {MAX_TOKENS} tokens a request", index)

    def accepted(self) -> None:
        variant = self.variant
        if variant.forward != "target-verify":
            self.unread("accept_lens", "verify modes")
            self.unread("reuse", "verify modes")
            return
        if not variant.accept_lens:
            if "reuse" in self.fields.values:
                self.add(
                    "reuse", "reuse without accept_lens", "accept_lens beside it: without them no slot is rejected"
                )
            return
        if len(variant.accept_lens) != len(variant.prefix_lens):
            found = f"{len(variant.accept_lens)} accept_lens for {len(variant.prefix_lens)} prefix_lens"
            self.add("accept_lens", found, "one of each for every request")
            return
        for index, (kept, rows) in enumerate(zip(variant.accept_lens, variant.extend_lens, strict=False)):
            if kept > rows:
                self.add("accept_lens", f"{kept} rows kept of {rows}", f"1 to {rows}, the root included", index)

    def graph(self) -> None:
        variant = self.variant
        if not self.drive.graph:
            self.unread("replays", "graph modes")
            self.unread("bucket", "graph modes")
            return
        live = sum(bool(batch) for batch in variant.replays)
        if len(variant.replays) < LEAST_REPLAYS:
            found = f"{len(variant.replays)} replays under {self.mode}"
            self.add("replays", found, f"at least {LEAST_REPLAYS} further batches")
        elif live < LEAST_LIVE:
            found = f"{live} of {len(variant.replays)} replays with requests under {self.mode}"
            self.add("replays", found, f"at least {LEAST_LIVE} with requests; others may be idle")
        largest = max(len(batch) for batch in (variant.prefix_lens, *variant.replays))
        if variant.bucket and variant.bucket < largest:
            self.add("bucket", f"bucket {variant.bucket} for a batch of {largest}", f"at least {largest}")

    def steps(self) -> None:
        if self.mode != "eagle-draft-runner":
            self.unread("num_steps", "eagle-draft-runner")
        elif not self.variant.num_steps:
            self.add("num_steps", "eagle-draft-runner without num_steps", "num_steps: 2 to 5")

    def options(self, ratio: int) -> None:
        variant = self.variant
        if ratio != 4 and "index_topk" in self.fields.values:
            self.add("index_topk", f"index_topk for ratio {ratio}", "index_topk only for ratio 4, which selects")
        if variant.large_pool and "cpu" in variant.devices:
            self.add("large_pool", "large_pool on a CPU", "devices: [gpu] beside it")
        if variant.gpu_only_lens and variant.forward == "extend":
            self.add(
                "gpu_only_lens",
                "gpu_only_lens for an extend",
                "host lengths: the sparse-prefill path sizes its workspace",
            )
