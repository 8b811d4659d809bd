"""The scraper keeps every rule of the script that it stands for, weaknesses included; the gate has none of them."""

from __future__ import annotations

import math

import pytest

from dsv4_matrix.gate.scrape import ScrapeError, compare_logs, number, reward_key, scrape


@pytest.mark.parametrize(
    ("line", "steps"),
    [
        ("step:1 - r/mean:0.5", {1: {"r/mean": "0.5"}}),
        ("step : 2 r/mean:0.5", {2: {"r/mean": "0.5"}}),
        ("(Worker pid=1) step:3 - a:1 - b:2", {3: {"a": "1", "b": "2"}}),
        ("global_step:7 - r:1", {}),
        ("x:step:7 - r:1", {}),
        ("\x1b[36mstep:7 - r:1", {}),
        ("val-step:7 - r:1", {7: {"r": "1"}}),
        ("training/step:7 - r:1", {7: {"r": "1"}}),
        ("step:1 - note:a - b - r:1", {1: {"note": "a", "r": "1"}}),
        ("step:1 - time:12:30 - r:1", {1: {"time": "12:30", "r": "1"}}),
        ("step:1 - r:1 - step:2 - r:3", {1: {"r": "3", "step": "2"}}),
        ("step:x - r:1", {}),
        ("steps:1 - r:1", {}),
    ],
)
def test_step_lines(line, steps):
    assert scrape(line) == steps


def test_a_later_line_replaces_the_earlier():
    assert scrape("step:1 - r:1 - s:2\nstep:1 - r:5\n") == {1: {"r": "5"}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (" 0.25 ", 0.25),
        ("np.float32(0.25)", 0.25),
        ("np.float64(-1e-3)", -1e-3),
        ("np.int64(7)", 7.0),
        ("np.uint8(7)", 7.0),
        ("tensor(0.25, device='cuda:0')", 0.25),
        ("0x10", 0.0),
        ("1e400", math.inf),
        ("-inf", -math.inf),
        ("about .5", 0.5),
    ],
)
def test_values(text, value):
    assert number(text) == value


@pytest.mark.parametrize("text", ["np.True_", "np.bool_(True)", "True", "", "nan"])
def test_values_that_are_none(text):
    assert math.isnan(number(text))


def test_choice_of_the_reward():
    assert reward_key(["x", "val/reward/mean", "critic/rewards/mean"]) == "critic/rewards/mean"
    assert reward_key(["a/reward_mean", "val/reward/mean"]) == "val/reward/mean"
    assert reward_key(["x", "a/reward_mean"]) == "a/reward_mean"
    with pytest.raises(ScrapeError, match="no reward mean among x"):
        reward_key(["x"])


def log(*values, first=1):
    return "\n".join(f"step:{at} - critic/rewards/mean:{value}" for at, value in enumerate(values, start=first))


def test_verdicts():
    assert compare_logs(log(0.1, 0.2), log(0.1, 0.2)).aligned
    assert not compare_logs(log(0.1, 0.2), log(0.1, 0.25)).aligned
    assert not compare_logs(log(0.1, 0.2), log(0.1)).aligned


@pytest.mark.parametrize(
    ("left", "right", "aligned"),
    [
        (log(0.0), log(-0.0), True),
        (log("nan"), log("nan"), False),
        (log(1.0), log(1.0 + 2.0**-40), True),
        (log(1.0, 2.0), log(1.0, 2.0, first=5), True),
        (log(1.0) + "\n" + log(3.0), log(3.0), True),
        (log(1e39), log("1e400"), True),
    ],
    ids=["signed-zero", "nan", "below-fp32", "other-step-numbers", "duplicate-step", "overflow"],
)
def test_weaknesses_are_kept(left, right, aligned):
    assert compare_logs(left, right).aligned is aligned


@pytest.mark.parametrize(
    ("left", "right", "told"),
    [
        ("", log(1.0), "no step line in the first"),
        (log(1.0), "no such thing", "no step line in the second"),
        ("step:1 - loss:1", log(1.0), "no reward mean among loss"),
        (log(1.0), "step:1 - loss:1", "no step has"),
    ],
)
def test_nothing_to_compare_is_an_error(left, right, told):
    with pytest.raises(ScrapeError, match=told):
        compare_logs(left, right)
