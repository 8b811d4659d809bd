"""The repository's matrix.yaml: every cell of the capability matrix, production's variants, and what it may cost."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest

from dsv4_matrix.declaration import Matrix, State, Variant
from dsv4_matrix.declaration.drives import DRIVES
from dsv4_matrix.declaration.sites import CALL_SITES, OWN_STEP

TITLES = (
    "Eager Phase 2",
    "CG decode",
    "PCG extend",
    "BCG extend",
    "Verify eager",
    "Verify CG",
    "DE eager",
    "DE CG",
    "DE-V2 CG",
    "EAGLE-draft runner",
    "EAGLE-DE runner",
    "FKVMTP runner",
)
MODES = tuple(DRIVES)

#: c covered, u production-unreachable, - not applicable; one letter a mode.
STATES = {0: "cc--cccc-cc-", 4: "cc--ccuu----", 128: "cc--ccuu----"}
LETTERS = {"c": State.COVERED, "u": State.UNREACHABLE, "-": State.NOT_APPLICABLE}

#: The least that is declared: (cell, forward, prefix_lens, extend_lens, other fields).
PRODUCTION: list[tuple[str, str, tuple[int, ...], tuple[int, ...], dict[str, object]]] = [
    ("r0/eager", "extend", (0,), (32,), {}),
    ("r0/eager", "extend", (48,), (16,), {"sink": "off"}),
    ("r0/eager", "extend", (48,), (16,), {"sink": "zero"}),
    ("r0/eager", "extend", (128,), (32,), {}),
    ("r0/eager", "extend", (96,), (32,), {}),
    ("r0/eager", "extend", (254,), (1,), {}),
    ("r0/eager", "extend", (255,), (1,), {}),
    ("r0/eager", "extend", (256,), (1,), {}),
    ("r0/eager", "extend", (256,), (4,), {}),
    ("r0/eager", "extend", (240,), (16,), {}),
    ("r0/eager", "decode", (64,), (), {}),
    ("r0/eager", "decode", (32, 96), (), {}),
    ("r0/eager", "decode", (160,), (), {}),
    ("r0/cg-decode", "decode", (64,), (), {}),
    ("r0/cg-decode", "decode", (32, 96), (), {}),
    ("r0/verify-eager", "target-verify", (64, 96), (3, 3), {}),
    ("r0/verify-cg", "target-verify", (64, 96), (3, 3), {}),
    ("r0/de-eager", "draft-extend", (64, 96), (1, 4), {"gpu_only_lens": True}),
    ("r0/de-eager", "draft-extend", (64, 96), (3, 2), {"gpu_only_lens": True}),
    ("r0/de-eager", "draft-extend", (64, 96), (4, 4), {}),
    ("r0/de-cg", "draft-extend", (64, 96), (4, 4), {}),
    ("r0/eagle-draft-runner", "decode", (32, 64), (), {"num_steps": 3}),
    ("r0/eagle-de-runner", "draft-extend", (64, 96), (4, 4), {}),
    ("r4/eager", "extend", (64,), (16,), {}),
    ("r4/eager", "decode", (64,), (), {}),
    ("r4/cg-decode", "decode", (64,), (), {}),
    ("r4/verify-eager", "target-verify", (64, 96), (3, 3), {}),
    ("r4/verify-cg", "target-verify", (64, 96), (3, 3), {}),
    ("r128/eager", "extend", (128,), (16,), {}),
    ("r128/eager", "decode", (128,), (), {}),
    ("r128/cg-decode", "decode", (128,), (), {}),
    ("r128/verify-eager", "target-verify", (128, 160), (3, 3), {}),
    ("r128/verify-cg", "target-verify", (128, 160), (3, 3), {}),
]


def totals(variant: Variant) -> set[int]:
    """Visible lengths p + 1 of every row of every batch, the draft runner's steps and verify's next step left out."""
    counts = variant.extend_lens or (1,)
    batches = [(prefix, counts[i % len(counts)]) for i, prefix in enumerate(variant.prefix_lens)]
    batches += [(prefix, max(counts)) for batch in variant.replays for prefix in batch]
    return {prefix + row + 1 for prefix, rows in batches for row in range(rows)}


def covered(matrix: Matrix, *modes: str) -> list[tuple[str, tuple[Variant, ...]]]:
    return [(cell.id, cell.variants) for cell in matrix.cells if cell.variants and (not modes or cell.mode in modes)]


def test_cells_and_states(own_matrix: Matrix) -> None:
    expected = {
        f"r{ratio}/{mode}": LETTERS[letter]
        for ratio, letters in STATES.items()
        for mode, letter in zip(MODES, letters, strict=True)
    }
    assert {cell.id: cell.state for cell in own_matrix.cells} == expected
    assert [cell.id for cell in own_matrix.cells] == list(expected), "cells come ratio by ratio, mode by mode"
    assert tuple(mode.title for mode in own_matrix.modes) == TITLES


def test_geometry_and_tolerances(own_matrix: Matrix) -> None:
    g = own_matrix.geometry
    assert (g.page_size, g.head_dim, g.nope, g.rope, g.window, g.bytes_per_token) == (256, 512, 448, 64, 128, 584)
    contract = own_matrix.tolerances
    assert (contract.eager.atol, contract.eager.rtol, contract.graph.atol, contract.graph.rtol) == (
        0.05,
        0.05,
        0.1,
        0.1,
    )


@pytest.mark.parametrize("row", PRODUCTION, ids=[str(row) for row in PRODUCTION])
def test_production_variant_is_declared_for_both_devices(
    own_matrix: Matrix, row: tuple[str, str, tuple[int, ...], tuple[int, ...], dict[str, object]]
) -> None:
    cell, forward, prefix_lens, extend_lens, others = row
    found = [
        variant
        for variant in own_matrix.cell(cell).variants
        if (variant.forward, variant.prefix_lens, variant.extend_lens) == (forward, prefix_lens, extend_lens)
        and all(getattr(variant, name) == value for name, value in others.items())
        and (variant.heads, variant.swa_page_size, variant.devices) == (64, 256, ("cpu", "gpu"))
    ]
    assert found


def test_reasons_are_sentences_of_their_own(own_matrix: Matrix) -> None:
    reasons = [cell.reason for cell in own_matrix.cells if not cell.variants]
    reasons += [refusal.reason for refusal in own_matrix.refusals]
    assert len(reasons) == 20 + len(own_matrix.refusals)
    assert max(Counter(reasons).values()) == 1


def test_probe_types_are_those_of_the_contract(own_matrix: Matrix) -> None:
    raised = {cell.id: cell.probe.raises for cell in own_matrix.cells if cell.probe}
    expected = {}
    for ratio in (0, 4, 128):
        expected |= {f"r{ratio}/{mode}": "NotImplementedError" for mode in ("pcg-extend", "bcg-extend")}
        expected |= {f"r{ratio}/{mode}": "AssertionError" for mode in ("de-v2-cg", "fkvmtp-runner")}
        if ratio:
            modes = ("de-eager", "de-cg", "eagle-draft-runner", "eagle-de-runner")
            expected |= {f"r{ratio}/{mode}": "ValueError" for mode in modes}
    assert raised == expected


@pytest.mark.parametrize(
    ("refusal", "good", "bad"),
    [
        (
            "beyond-context",
            (
                "a request of 257 tokens; the table has 256",
                "seq_lens exceed max_context_len",
                "sequence beyond the context length",
                "req_to_token is too narrow",
            ),
            ("batch of 3 beyond the captured 2", "index 2570 is out of bounds", ""),
        ),
    ],
)
def test_messages_that_a_refusal_takes(
    own_matrix: Matrix, refusal: str, good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    """Any message that names what is refused, in whatever words, and none of another refusal."""
    probe = next(entry.probe for entry in own_matrix.refusals if entry.name == refusal)
    assert all(re.search(probe.match, message) for message in good)
    assert not any(re.search(probe.match, message) for message in bad)


def test_every_site_is_probed(own_matrix: Matrix) -> None:
    """The one for cells without a site of their own may be, others have to be."""
    used = {case.probe.site for case in own_matrix.cases() if case.probe}
    assert used | {OWN_STEP} == set(CALL_SITES)


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_boundaries_of_every_ratio_run_on_a_cpu(own_matrix: Matrix, ratio: int) -> None:
    """Total lengths around an entry, the window and a page, in eager and in graph decode."""
    for mode in ("eager", "cg-decode"):
        seen: set[int] = set()
        for variant in own_matrix.cell(f"r{ratio}/{mode}").variants:
            if "cpu" in variant.devices and variant.forward == "decode":
                seen |= totals(variant)
        want = {127, 128, 129, 255, 256, 257} | ({3, 4, 5} if ratio != 128 else set())
        assert want - seen == set(), f"r{ratio}/{mode}"


def test_graph_variants_replay_other_batches(own_matrix: Matrix) -> None:
    """Each cell: growing, shrinking, idle in between, and a bucket larger than the batch."""
    for cell, variants in covered(
        own_matrix, "cg-decode", "verify-cg", "de-cg", "eagle-draft-runner", "eagle-de-runner"
    ):
        sizes = [[len(batch) for batch in (variant.prefix_lens, *variant.replays)] for variant in variants]
        steps = [(a, b) for row in sizes for a, b in pairwise(row)]
        assert all(len(variant.replays) >= 3 for variant in variants), cell
        assert any(0 < a < b for a, b in steps), f"{cell} never grows"
        assert any(a > b > 0 for a, b in steps), f"{cell} never shrinks"
        assert any(0 in row[1:-1] for row in sizes), f"{cell} is never idle in between"
        assert any(variant.bucket > max(row) for variant, row in zip(variants, sizes, strict=True)), (
            f"{cell} never pads"
        )


def test_replays_lie_on_both_sides_of_the_window_and_of_a_page(own_matrix: Matrix) -> None:
    """In every graph cell; a capture sees pad rows only, so that every batch is a replay."""
    for cell, variants in covered(
        own_matrix, "cg-decode", "verify-cg", "de-cg", "eagle-draft-runner", "eagle-de-runner"
    ):
        seen = {
            total + step
            for variant in variants
            if "cpu" in variant.devices
            for total in totals(variant)
            for step in range(max(1, variant.num_steps - 1))
        }
        assert seen >= {127, 128, 129, 255, 256, 257}, cell


def test_hostile_settings_reach_every_eager_and_decode_cell(own_matrix: Matrix) -> None:
    for cell, variants in covered(own_matrix, "eager", "cg-decode"):
        assert {variant.pages for variant in variants} >= {"shuffled", "interleaved", "reversed"}, cell
        assert {variant.sink for variant in variants} >= {"off", "per-head"}, cell
        assert {variant.swa_page_size for variant in variants} == {128, 256}, cell
        assert {variant.q_layout for variant in variants} == {"contiguous", "strided"}, cell
        assert {variant.history for variant in variants} == {"full", "window"}, cell
        assert any(variant.gpu_only_lens for variant in variants), cell
        assert len({variant.heads for variant in variants}) >= 3, cell
    for ratio in (0, 4, 128):
        assert any(not variant.prefix_lens for variant in own_matrix.cell(f"r{ratio}/eager").variants)


def test_heads_of_every_count(own_matrix: Matrix) -> None:
    assert {variant.heads for _, variants in covered(own_matrix) for variant in variants} == {16, 32, 64, 128}


def test_c4_selects_from_more_than_topk(own_matrix: Matrix) -> None:
    for mode in ("eager", "cg-decode"):
        variants = [v for v in own_matrix.cell(f"r4/{mode}").variants if "cpu" in v.devices]
        assert any(total // 4 > variant.index_topk for variant in variants for total in totals(variant)), mode
    assert any(variant.index_topk == 1024 for variant in own_matrix.cell("r4/eager").variants)


def test_verify_covers_draft_counts_and_rejections(own_matrix: Matrix) -> None:
    drafts: set[int] = set()
    for _, variants in covered(own_matrix, "verify-eager", "verify-cg"):
        drafts |= {rows for variant in variants for rows in variant.extend_lens}
        rejecting = [v for v in variants if any(a < e for a, e in zip(v.accept_lens, v.extend_lens, strict=False))]
        assert {variant.reuse for variant in rejecting} == {"next-step", "freed"}
    assert drafts == set(range(2, 9))
    for cell, variants in covered(own_matrix, "verify-eager"):
        assert any(len(set(variant.extend_lens)) > 1 for variant in variants), f"{cell} has no ragged variant"


@pytest.mark.parametrize(("ratio", "prefixes"), [(4, {2}), (128, {126, 254})])
def test_verify_crosses_emissions(own_matrix: Matrix, ratio: int, prefixes: set[int]) -> None:
    for mode in ("verify-eager", "verify-cg"):
        starts = {p for v in own_matrix.cell(f"r{ratio}/{mode}").variants for p in v.prefix_lens}
        assert prefixes <= ({p % 4 for p in starts} if ratio == 4 else starts)


@pytest.mark.parametrize(
    ("ratio", "starts"), [(0, {124, 125, 252, 253}), (4, {252, 253, 254, 255}), (128, set(range(119, 128)))]
)
def test_every_acceptance_is_tried_at_every_start(own_matrix: Matrix, ratio: int, starts: set[int]) -> None:
    variants = {variant.name: variant for variant in own_matrix.cell(f"r{ratio}/verify-eager").variants}
    sweep = variants["every-acceptance"]
    pairs = set(zip(sweep.prefix_lens, sweep.accept_lens, strict=True))
    assert pairs == {(start, kept) for start in starts for kept in range(1, 9)}
    assert set(sweep.extend_lens) == {8}


def test_each_cell_can_show_each_perturbation_on_a_cpu(own_matrix: Matrix) -> None:
    """A sink that counts, a window that is full and one that is not, and a compressed entry to see early."""
    for cell, variants in covered(own_matrix):
        here = [variant for variant in variants if "cpu" in variant.devices]
        seen = set().union(*(totals(variant) for variant in here))
        ratio = own_matrix.cell(cell).ratio
        assert any(variant.sink != "off" for variant in here), cell
        assert min(seen) < 128 <= max(seen) - 1, cell
        assert not ratio or any(total >= ratio for total in seen), cell


def test_draft_runner_steps(own_matrix: Matrix) -> None:
    assert {v.num_steps for v in own_matrix.cell("r0/eagle-draft-runner").variants} == {2, 3, 4, 5}


def test_long_contexts_and_large_pools_are_gpu_only(own_matrix: Matrix) -> None:
    r128 = own_matrix.cell("r128/eager").variants
    assert any(total // 128 >= 2048 for variant in r128 for total in totals(variant))
    large = {cell for cell, variants in covered(own_matrix) for variant in variants if variant.large_pool}
    assert large == {"r0/eager", "r4/eager"}


def test_cost_stays_within_the_budgets(own_matrix: Matrix) -> None:
    """About 11 ms a row-block in the interpreter, two cores: a bit over a minute for the CPU."""
    on_cpu = [case.variant for case in own_matrix.cases("cpu") if case.variant]
    total = sum(variant.cost for variant in on_cpu)
    assert total <= 12_000, (
        f"CPU variants cost {total} row-blocks, the limit is 12,000: shorten the new variant or another, declare it "
        f"devices: [gpu], or raise the limit here and say why"
    )
    assert len(own_matrix.cases()) <= 170


def test_every_cell_runs_on_a_cpu(own_matrix: Matrix) -> None:
    on_cpu = {case.cell_id for case in own_matrix.cases("cpu") if case.kind == "case"}
    assert on_cpu == {cell for cell, _ in covered(own_matrix)}


def test_case_ids_are_unique_sorted_and_plain(own_matrix: Matrix) -> None:
    ids = [case.id for case in own_matrix.cases()]
    assert ids == sorted(set(ids))
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", case_id) for case_id in ids)


def test_no_mode_name_continues_another() -> None:
    """What keeps case ids unique without ever parsing one: ``r0-<mode>-`` is a prefix of no other mode's ids."""
    assert not [(a, b) for a in DRIVES for b in DRIVES if a != b and f"{b}-".startswith(f"{a}-")]


def test_ids_and_seeds_do_not_depend_on_the_process() -> None:
    code = (
        "from dsv4_matrix.declaration import load_matrix, find_matrix\n"
        "print([(c.id, c.seed) for c in load_matrix(find_matrix()).cases()])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True, text=True
        ).stdout
        for seed in ("0", "1")
    }
    assert len(outputs) == 1
