"""Looks at growing numbers of seeds: quantiles by the tables, intervals by hand, false alarms and power by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trl_ext.evaluation.statistics import paired_interval, student_t_quantile
from trl_ext.tools.experiments.verdict.sequential import (
    BETTER,
    EQUAL,
    OPEN,
    WORSE,
    Design,
    decision,
    first_alarms,
    power,
    repeated_interval,
    seeds_needed,
)


@pytest.mark.parametrize(
    ("outside", "freedom", "t"),
    [  # Student's t as it is tabulated, two-sided
        (0.05, 1, 12.706), (0.05, 2, 4.303), (0.05, 3, 3.182), (0.05, 10, 2.228), (0.01, 4, 4.604), (0.001, 7, 5.408),
        (0.5, 5, 0.727), (0.05, 30, 2.042), (0.002, 9, 4.297),
    ],
)  # fmt: skip
def test_quantiles_of_t_are_those_of_the_tables(outside: float, freedom: int, t: float) -> None:
    assert student_t_quantile(outside, freedom) == pytest.approx(t, abs=5e-4)


def test_a_share_or_freedom_that_there_is_not_is_refused() -> None:
    for outside, freedom in ((0.0, 3), (1.0, 3), (0.05, 0)):
        with pytest.raises(ValueError, match="a share between 0 and 1"):
            student_t_quantile(outside, freedom)


def test_interval_has_the_level_and_least_deviation_it_is_given() -> None:
    # mean 0.02, standard deviation 0.01, n 4: t of 1 % and 3 degrees of freedom is 5.841
    low, high = paired_interval([0.01, 0.01, 0.03, 0.03], 0.01)
    half = 5.841 * math.sqrt(4 / 3) * 0.01 / 2
    assert (low, high) == pytest.approx((0.02 - half, 0.02 + half), abs=1e-5)
    assert paired_interval([0.5, 0.5]) == (0.5, 0.5)
    assert paired_interval([0.5, 0.5, 0.5, 0.5], 0.05, 0.1) == pytest.approx((0.5 - 0.1591, 0.5 + 0.1591), abs=1e-4)


def test_looks_are_even_few_and_end_with_the_last_seed() -> None:
    assert [Design(most).looks for most in (4, 5, 6, 8, 10, 20)] == [
        [4], [5], [4, 6], [4, 6, 8], [4, 6, 8, 10], [4, 9, 15, 20],
    ]  # fmt: skip
    with pytest.raises(ValueError, match="the first look must be at 2 seeds or more and 3 at most, got 4"):
        Design(3)


def test_error_is_spent_in_proportion_to_the_seeds() -> None:
    levels = Design(10, intervals=4).levels
    assert levels == pytest.approx({4: 0.005, 6: 0.0025, 8: 0.0025, 10: 0.0025})
    for most in (4, 5, 7, 12, 33):
        assert sum(Design(most, intervals=3).levels.values()) == pytest.approx(0.05 / 3)


def test_interval_is_what_all_looks_leave() -> None:
    design = Design(6)
    first, later = [0.01, 0.02, 0.03, 0.02], [0.20, -0.20]
    assert repeated_interval(first[:3], design) is None
    early = repeated_interval(first, design)
    assert early == paired_interval(first, 0.05 * 4 / 6)
    assert repeated_interval([*first, 0.9], design) == early  # a fifth seed is not looked at
    assert repeated_interval(first + later, design) == early  # which the noise of the last two does not widen


def test_of_looks_that_contradict_each_other_the_last_holds() -> None:
    design = Design(20)
    values = [0.1, 0.1001] * 2 + [0.5, 0.5001] * 8
    assert repeated_interval(values, design) == paired_interval(values, design.levels[20])


@pytest.mark.parametrize(
    ("interval", "said"),
    [((0.001, 0.5), BETTER), ((-0.5, -0.001), WORSE), ((-0.019, 0.019), EQUAL), ((-0.02, 0.01), OPEN),
     ((-0.01, 0.02), OPEN), ((0.0, 0.5), OPEN), (None, OPEN)],
)  # fmt: skip
def test_an_interval_decides_or_does_not(interval: tuple[float, float] | None, said: str) -> None:
    assert decision(interval, 0.02) == said


def test_alarms_of_many_rows_are_those_of_each() -> None:
    design = Design(8, intervals=2)
    rows = np.random.default_rng(1).normal(0.02, 0.02, (200, 8))
    expected = []
    for row in rows:
        said = {n: decision(repeated_interval(row[:n].tolist(), Design(8, 2)), 0.02) for n in design.looks}
        at = next((n for n, word in said.items() if word in (BETTER, WORSE)), 0)
        expected.append(at if at == 0 or said[at] == BETTER else -at)
    assert first_alarms(rows, design).tolist() == expected
    assert set(expected) >= {0, 4, 6, 8}


def test_false_alarms_stay_below_what_was_promised() -> None:
    rng = np.random.default_rng(2)
    draws, design = 20000, Design(10, intervals=4)
    shared = rng.normal(size=(draws, 10, 1))
    for correlation in (0.0, 0.9):  # of the four intervals' differences
        noise = rng.normal(size=(draws, 10, 4))
        all_of_them = math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * noise
        alarms = np.stack([first_alarms(all_of_them[..., i], design) != 0 for i in range(4)])
        assert alarms.any(axis=0).mean() <= 0.05
    alarms = first_alarms(rng.normal(size=(draws, 10)), Design(10)) != 0
    assert 0.03 < alarms.mean() <= 0.05  # nor is much of it left


def test_power_of_a_single_look_is_that_of_the_t_test() -> None:
    # noncentral t, 9 degrees of freedom, noncentrality sqrt(10): 0.803 (Cohen 1988, d = 1 at n = 10, two-sided 5 %)
    assert power(Design(10, first=10), 1.0, 1.0) == pytest.approx(0.803, abs=0.02)
    assert power(Design(10, first=10), -1.0, 1.0) == pytest.approx(0.803, abs=0.02)
    assert power(Design(10), 1.0, 1.0) < 0.80
    assert power(Design(8), 0.0, 1.0) == 0.0  # no direction to be right about


def test_fewest_seeds_with_the_power_that_is_wanted() -> None:
    needed = seeds_needed(0.02, 0.015, intervals=2)
    assert needed is not None
    assert power(Design(needed, 2), 0.02, 0.015) >= 0.8 > power(Design(needed - 1, 2), 0.02, 0.015)
    assert seeds_needed(0.001, 0.1, intervals=2) is None
