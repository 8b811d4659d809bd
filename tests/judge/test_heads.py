"""Which heads fail is told where not all do, in a kernel's words."""

import pytest
import torch

from dsv4_matrix.judge.heads import name_heads


@pytest.mark.parametrize(
    ("failing", "heads", "name"),
    [
        ([], 64, ""),
        (range(64), 64, ""),
        ([2], 64, "2 only"),
        (range(64, 128), 128, "64 to 127"),
        ([4, 5], 16, "4 to 5"),
        (range(6, 64, 8), 64, "6 mod 8"),
        ([4, 12], 16, "4 mod 8"),
        (range(0, 16, 2), 16, "0 mod 2"),
        # neither one of so many heads throughout, nor tiles of a power of two
        ([8, 12], 16, "8, 12"),
        ([0, 63], 64, "0, 63"),
        ([0, 3, 6, 9, 12, 15], 16, "0, 3, 6, 9, 12, 15"),
        ([0, 1, 3, 4, 6, 7, 9, 10, 12, 13], 16, "0, 1, 3, 4, 6, 7, 9, 10 and 2 more"),
    ],
)
def test_names(failing, heads, name):
    assert name_heads(list(failing), heads) == name


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (slice(5, 6), "heads    5 only, of 16"),
        (slice(8, 16), "heads    8 to 15, of 16"),
        (slice(2, 16, 4), "heads    2 mod 4, of 16"),
        (slice(0, 16), None),
    ],
)
@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_message_tells_them_where_not_all_fail(kit, wrong, told, value):
    step = kit.step("some-heads", 0, (127, 300))
    out, lse = kit.kernel(step)
    out[1, wrong] = value
    verdict = kit.one(step, (out, lse))
    assert verdict.outcome == "failed"
    lines = [line.strip() for line in verdict.message.splitlines() if line.strip().startswith("heads ")]
    assert lines == ([told] if told else [])


def test_heads_of_a_wrong_log_sum_exp_alone_are_told_too(kit):
    step = kit.step("some-sums", 0, (127, 300))
    out, lse = kit.kernel(step)
    lse[:, 3] += torch.log(torch.tensor(2.0))
    assert "heads    3 only, of 16" in kit.one(step, (out, lse)).message
