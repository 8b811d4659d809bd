"""Visibility against the table of boundary positions and a definition by brute force."""

import dsv4_reference
import pytest
import torch

POSITIONS = [0, 1, 2, 3, 4, 7, 8, 126, 127, 128, 129, 254, 255, 256, 257, 511, 512, 1023, 1024]


def as_sets(ids):
    return [sorted(value for value in row if value >= 0) for row in ids.tolist()]


@pytest.mark.parametrize(
    ("position", "window", "c4", "c128"),
    [
        (0, 1, 0, 0),
        (2, 3, 0, 0),
        (3, 4, 1, 0),
        (126, 127, 31, 0),
        (127, 128, 32, 1),
        (128, 128, 32, 1),
        (254, 128, 63, 1),
        (255, 128, 64, 2),
        (256, 128, 64, 2),
    ],
)
def test_counts_at_the_boundaries(position, window, c4, c128):
    row = torch.tensor([position])
    everything = torch.arange(512)[None]
    tokens, entries = dsv4_reference.visible(4, row, everything)
    assert (len(as_sets(tokens)[0]), len(as_sets(entries)[0])) == (window, c4)
    assert len(as_sets(dsv4_reference.visible(128, row)[1])[0]) == c128
    assert dsv4_reference.visible(0, row)[1].shape == (1, 0)


def test_every_row_of_a_batch_sees_what_the_definition_says():
    generator = torch.Generator().manual_seed(5)
    positions = torch.tensor(POSITIONS)
    selection = torch.stack([torch.randperm(400, generator=generator)[:64] for _ in POSITIONS]).int()
    selection[:, ::7] = -1
    for ratio in (0, 4, 128):
        tokens, entries = dsv4_reference.visible(ratio, positions, selection)
        for row, p in enumerate(POSITIONS):
            assert as_sets(tokens)[row] == [t for t in range(p + 1) if p - t < 128]
            # An entry is seen if its last token is: entry j covers tokens j r .. j r + r - 1.
            offered = selection[row].tolist() if ratio == 4 else range(p + 1)
            complete = [j for j in offered if j >= 0 and j * ratio + ratio - 1 <= p] if ratio else []
            assert as_sets(entries)[row] == sorted(complete), (ratio, p)


def test_the_newest_token_comes_first_and_its_width_follows_the_batch():
    tokens, _ = dsv4_reference.visible(0, torch.tensor([2, 0]))
    assert tokens.tolist() == [[2, 1, 0], [0, -1, -1]]


@pytest.mark.parametrize("window", [127, 129])
def test_the_window_knob_moves_the_oldest_token_only(window):
    tokens, _ = dsv4_reference.visible(0, torch.tensor([300]), window=window)
    assert as_sets(tokens)[0] == list(range(300 - window + 1, 301))


def test_the_early_knob_shows_one_entry_more():
    positions = torch.tensor([2, 6, 126, 254])
    selection = torch.arange(128).expand(4, 128)
    assert [len(row) for row in as_sets(dsv4_reference.visible(4, positions, selection, early=1)[1])] == [1, 2, 32, 64]
    assert [len(row) for row in as_sets(dsv4_reference.visible(128, positions, early=1)[1])] == [1, 1, 1, 2]


def test_rows_before_the_beginning_and_no_rows_see_nothing():
    tokens, entries = dsv4_reference.visible(128, torch.tensor([-3, -1]))
    assert (as_sets(tokens), as_sets(entries)) == ([[], []], [[], []])
    tokens, entries = dsv4_reference.visible(4, torch.zeros(0).long(), torch.zeros(0, 512).int())
    assert (tokens.shape[0], entries.shape[0]) == (0, 0)


def test_wrong_inputs_are_named():
    with pytest.raises(ValueError, match=r"one of \(0, 4, 128\), got 2"):
        dsv4_reference.visible(2, torch.tensor([1]))
    with pytest.raises(ValueError, match=r"needs the indexer's selection \[2, topk\], got None"):
        dsv4_reference.visible(4, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"must be \[T\], got shape \(1, 1\)"):
        dsv4_reference.visible(0, torch.tensor([[1]]))
