"""A small valid declaration: two ratios, two modes, and a cell each that is covered twice, deferred and blocked."""

from __future__ import annotations

SMALL = """\
schema: 1
geometry: {page_size: 256, head_dim: 512, nope: 448, rope: 64, window: 128, bytes_per_token: 584}
tolerances:
  eager: {atol: 5.0e-2, rtol: 5.0e-2}
  graph: {atol: 1.0e-1, rtol: 1.0e-1}
  budget: {baseline_factor: 2, rounding: 1, mean_rounding: 0.5, cosine: 1.0e-5, lse_factor: 2, lse_rounding: 64}
ratios: [0, 4]
modes:
  eager: {title: Eager, summary: one step after another}
  verify-cg: {title: Verify CG, summary: a captured chain of drafts}
profiles:
  chains:
    - {name: chain, prefix_lens: [64, 96], extend_lens: [3, 3], accept_lens: [1, 2], replays: [[65], [], [66]]}
cells:
  r0/eager:
    state: covered
    variants:
      - {name: extend, forward: extend, prefix_lens: [0], extend_lens: [32]}
      - {name: decode, forward: decode, prefix_lens: [32, 96]}
  r0/verify-cg: {state: covered, profiles: [chains]}
  r4/eager:
    state: deferred
    reason: Ratio 4 is not wired up yet.
    probe: {site: own-step, raises: ValueError, match: invalid compress_ratio}
  r4/verify-cg:
    state: blocked
    reason: Verify needs a selection for each row.
    probe: {site: own-step, raises: ValueError, match: selection}
refusals:
  page-size:
    reason: Pages have 256 tokens.
    probe: {site: page-size, raises: AssertionError, match: page_size=256}
"""
