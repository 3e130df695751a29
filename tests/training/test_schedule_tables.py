"""Schedules against tables and their promises."""

from __future__ import annotations

import math

import pytest

from specforge.training.scheduler import Constant, Cosine, WarmupStableDecay


def table(schedule, total):
    return [schedule.factor(step, total) for step in range(total)]


def test_cosine_table():
    got = table(Cosine(warmup_steps=2, warmup_ratio=0.5, min_ratio=0.0), 6)
    assert got == pytest.approx([0.5, 1.0, 1.0, 0.5 * (1 + math.cos(math.pi / 4)), 0.5, 0.5 * (1 + math.cos(3 * math.pi / 4))])


def test_cosine_ends_above_its_floor():
    schedule = Cosine(warmup_steps=None, warmup_ratio=0.1, min_ratio=0.2)
    got = table(schedule, 100)
    assert schedule.num_warmup_steps(100) == 10
    assert min(got[10:]) >= 0.2 and schedule.factor(100, 100) == pytest.approx(0.2) and schedule.factor(500, 100) == pytest.approx(0.2)
    assert got[10:] == sorted(got[10:], reverse=True)


def test_constant_table():
    assert table(Constant(warmup_steps=4, warmup_ratio=0.0), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert table(Constant(warmup_steps=None, warmup_ratio=0.0), 3) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "shape, expected",
    [("linear", [1.0, 0.75, 0.5, 0.25]), ("one_minus_sqrt", [1.0, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75)])],
)
def test_wsd_table(shape, expected):
    schedule = WarmupStableDecay(warmup_steps=2, warmup_ratio=0.0, min_ratio=0.0, decay_ratio=0.5, decay_shape=shape)
    assert table(schedule, 10) == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, *expected])


def test_wsd_cosine_and_floor():
    schedule = WarmupStableDecay(warmup_steps=0, warmup_ratio=0.0, min_ratio=0.1, decay_ratio=0.2, decay_shape="cosine")
    assert schedule.factor(9, 10) == pytest.approx(0.1 + 0.9 * 0.5)
    assert schedule.factor(10, 10) == pytest.approx(0.1)
    no_decay = WarmupStableDecay(warmup_steps=0, warmup_ratio=0.0, min_ratio=0.1, decay_ratio=0.0, decay_shape="linear")
    assert table(no_decay, 5) == [1.0] * 5


def test_warmup_is_rounded_up_once():
    assert Constant(warmup_steps=None, warmup_ratio=0.03).num_warmup_steps(100) == 3
    assert Constant(warmup_steps=None, warmup_ratio=0.03).num_warmup_steps(10) == 1
