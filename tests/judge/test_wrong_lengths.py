"""Lists that are read past their lengths are named, each by itself and both together, and nothing else is."""

import dsv4_reference
import pytest

WINDOW = "the window's list read past its length"
ENTRIES = "the list of compressed entries read past its length"
BOTH = "both lists read past their lengths"
COMBINED = "the combined list of entries and window read past its length"


def agrees(kit, step, answer):
    verdict = kit.one(step, answer)
    assert verdict.outcome == "failed"
    return next(line for line in verdict.message.splitlines() if line.startswith("  agrees"))


def counted_again(kit, step, *keys):
    """The answer of one row with ``keys``, pairs of a column of its index and a number, counted so often again."""
    bank, index = kit.keys(step)
    row = index[0].tolist()
    for column, times in keys:
        assert row[column] >= 0
        row += [row[column]] * times
    out, lse = dsv4_reference.attend(step.q, bank, index.new_tensor([row]), step.sink, step.softmax_scale)
    return out.bfloat16(), lse.float()


def beyond(length, width):
    """Columns past a list's length that hold a key: the first one and every second one behind it."""
    return len(range(length, width, 2))


@pytest.mark.parametrize("column", [0, 20, 63])
@pytest.mark.parametrize("ratio", [0, 4])
def test_the_windows_list_is_named(kit, ratio, column):
    step = kit.step(f"window-{ratio}", ratio, (63,), sink="per-head")
    answer = counted_again(kit, step, (column, beyond(64, 128)))
    assert agrees(kit, step, answer) == f"  agrees   with: {WINDOW} (row 0)"


@pytest.mark.parametrize(("ratio", "position", "width"), [(4, 400, 512), (4, 70, 512), (128, 700, 64), (128, 200, 192)])
def test_the_list_of_entries_is_named(kit, ratio, position, width):
    step = kit.step(f"entries-{ratio}", ratio, (position,), sink="per-head")
    tokens, entries = min(position + 1, 128), (position + 1) // ratio
    answer = counted_again(kit, step, (tokens + entries // 2, beyond(entries, width)))
    assert agrees(kit, step, answer) == f"  agrees   with: {ENTRIES} (row 0)"


@pytest.mark.parametrize("position", [9, 66, 126])
def test_both_lists_together_are_named(kit, position):
    step = kit.step(f"both-{position}", 4, (position,), sink="per-head")
    tokens, entries = position + 1, (position + 1) // 4
    again = ((tokens // 2, beyond(tokens, 128)), (tokens + entries // 2, beyond(entries, 512)))
    assert agrees(kit, step, counted_again(kit, step, *again)) == f"  agrees   with: {BOTH} (row 0)"


@pytest.mark.parametrize("position", [70, 400])
def test_the_combined_list_of_a_prefill_is_named(kit, position):
    step = kit.step(f"combined-{position}", 4, (position,), sink="per-head")
    length = min(position + 1, 128) + (position + 1) // 4
    answer = counted_again(kit, step, (5, beyond(length, 640)))
    assert agrees(kit, step, answer) == f"  agrees   with: {COMBINED} (row 0)"


@pytest.mark.parametrize(("position", "keys"), [(63, [(20, 7)]), (400, [(140, 5)]), (63, [(20, 9), (70, 9)])])
def test_keys_that_are_counted_as_often_as_no_width_gives_are_no_known_mistake(kit, position, keys):
    step = kit.step(f"no-width-{position}", 4, (position,), sink="per-head")
    assert agrees(kit, step, counted_again(kit, step, *keys)) == "  agrees   with no known mistake"


def test_each_row_has_the_name_of_the_lists_that_it_has(kit):
    """A row before the first entry has one list, a row with a full window leaves nothing past that."""
    rows = [kit.step(f"rows-{position}", 4, (position,), sink="per-head") for position in (1, 60, 300)]
    keys = [[(0, 63)], [(9, beyond(61, 128)), (70, beyond(15, 512))], [(150, beyond(75, 512))]]
    told = [agrees(kit, step, counted_again(kit, step, *again)) for step, again in zip(rows, keys, strict=True)]
    assert told == [f"  agrees   with: {name} (row 0)" for name in (WINDOW, BOTH, ENTRIES)]
