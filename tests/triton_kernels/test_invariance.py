"""A row's bits depend on the row alone: not on batch, padding, widths, chunks of the workspace or physical slots."""

from __future__ import annotations

import math

import pytest
import torch
from dsv4_triton import attention, workload
from dsv4_triton.attention import SPLIT_KEYS, sparse_attention

SCALE = 512**-0.5


@pytest.fixture
def batch(random_keys, generator, device):
    """Rows of one and of two splits, an empty one and a pad row, over two lists."""
    main, slots = random_keys(4, 64, live=0.8)
    extra, extra_slots = random_keys(64, 2, live=0.8)

    def choose(live: torch.Tensor, width: int) -> torch.Tensor:
        return live[torch.randint(len(live), (5, width), generator=generator)].to(device)

    return {
        "q": torch.randn(5, 16, 512, generator=generator).bfloat16().to(device),
        "cache": main.view,
        "indices": choose(slots, 128),
        "lengths": torch.tensor([128, 128, 1, 0, 70], dtype=torch.int32, device=device),
        "sink": torch.randn(16, generator=generator).to(device),
        "scale": SCALE,
        "extra_cache": extra.view,
        "extra_indices": choose(extra_slots, SPLIT_KEYS),
        "extra_lengths": torch.tensor([SPLIT_KEYS, 3, 0, 0, 600], dtype=torch.int32, device=device),
    }


def rows(batch, at):
    names = ("q", "indices", "lengths", "extra_indices", "extra_lengths")
    return batch | {name: batch[name][at] for name in names}


def same(a, b):
    return all(map(torch.equal, a, b))


def test_alone_permuted_or_in_a_batch(batch, device):
    whole = sparse_attention(**batch)
    for row in range(5):
        alone = sparse_attention(**rows(batch, slice(row, row + 1)))
        assert same(alone, (whole[0][row : row + 1], whole[1][row : row + 1]))
    order = torch.tensor([3, 0, 4, 0, 2], device=device)
    assert same(sparse_attention(**rows(batch, order)), (whole[0][order], whole[1][order]))


def test_wider_index_tensors(batch):
    """Width decides how many programs start, never what a row computes: 64 entries of junk, then four more splits."""
    want = sparse_attention(**batch)
    for extra in (1, 64, 4 * SPLIT_KEYS):
        wide = batch | {
            name: torch.nn.functional.pad(batch[name], (0, extra), value=7) for name in ("indices", "extra_indices")
        }
        assert same(sparse_attention(**wide), want)


def test_trailing_padding_without_lengths(batch):
    """-1 padding past a split boundary gives the bits of the short list: a split without keys weighs nothing."""
    one = rows(batch, slice(1, 2)) | {"lengths": None, "extra_lengths": None}
    short = one | {"extra_cache": None, "extra_indices": None}
    padded = one | {"extra_indices": torch.full_like(one["extra_indices"], -1)}
    assert same(sparse_attention(**short), sparse_attention(**padded))


def test_pad_rows_of_nan(batch):
    """faults.md A13, H5: NaN queries in an empty row and in a row with keys leave the other rows' bits alone."""
    out, lse = sparse_attention(**batch)
    batch["q"][3:] = math.nan
    got = sparse_attention(**batch)
    assert same((got[0][:4], got[1][:4]), (out[:4], lse[:4])), "row 3 has no keys: zeros, whatever its query"
    assert bool(got[0][4].isnan().all())


def test_workspace_in_chunks(batch, monkeypatch):
    want = sparse_attention(**batch)
    monkeypatch.setattr(workload, "WORKSPACE_BYTES", 1)
    assert same(sparse_attention(**batch), want)


@pytest.mark.parametrize("kv", [1, 3, 17, 128, 200])
def test_many_splits_agree_with_one(kv, batch, oracle, check, monkeypatch, device):
    """faults.md A9, H9: more splits than keys, workspace poisoned; one split and many keep the same bound."""
    one = rows(batch, slice(0, 1))
    one |= {
        "lengths": torch.tensor([min(kv, 128)], dtype=torch.int32, device=device),
        "extra_lengths": torch.tensor([kv - min(kv, 128)], dtype=torch.int32, device=device),
    }
    single = sparse_attention(**one)
    monkeypatch.setattr(attention, "SPLIT_KEYS", 64)
    fresh = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: fresh(*a, **k).fill_(math.nan))
    many = sparse_attention(**one)
    blocks = -(-min(kv, 128) // 64) + -(-(kv - min(kv, 128)) // 64)
    assert torch.allclose(single[0].float(), many[0].float(), atol=2e-2, rtol=2e-2)
    assert torch.allclose(single[1], many[1], atol=1e-4)
    if blocks == 1:
        assert same(single, many)


def test_runs_repeat_themselves(batch):
    want = sparse_attention(**batch)
    for _ in range(3):
        assert same(sparse_attention(**batch), want)


def test_the_comparison_sees_one_ulp(batch):
    """What makes these checks worth something: a reordered list is another sum, and its bits differ."""
    want = sparse_attention(**batch)
    batch["extra_indices"] = batch["extra_indices"].roll(300, 1)
    got = sparse_attention(**batch)
    assert torch.allclose(got[0][0].float(), want[0][0].float(), atol=2e-2)
    assert not same(got, want)
