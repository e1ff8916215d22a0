"""Intervals and paired comparison, against published values and by simulation."""

from __future__ import annotations

import numpy as np
import pytest

from trl_ext.evaluation.statistics import (
    compare_paired,
    latest_within_one_standard_error,
    mean_interval,
    sign_test,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "trials", "expected"),
    [
        (81, 263, (0.2553, 0.3662)),  # Newcombe 1998, table I: method 3
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0000, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ],
)
def test_wilsons_interval_is_as_published(successes: int, trials: int, expected: tuple[float, float]) -> None:
    assert wilson_interval(successes, trials) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (0, 0), (-1, 5), (6, 5)])
def test_an_interval_of_nothing_is_refused(successes: int, trials: int) -> None:
    with pytest.raises(ValueError, match="successes in"):
        wilson_interval(successes, trials)


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("problems", "samples", "alpha", "beta"),  # of the Beta distribution of a problem's chance of a correct sample
    [
        (30, 32, 0.3, 1.0),
        (30, 1, 0.3, 1.0),
        (40, 32, 0.5, 0.5),
        (60, 4, 1.0, 1.0),
        (128, 4, 0.2, 1.0),
        (500, 1, 0.7, 0.3),
    ],
)
def test_interval_of_a_mean_over_problems_covers(problems: int, samples: int, alpha: float, beta: float) -> None:
    draw = np.random.default_rng(0)
    mean, repeats = alpha / (alpha + beta), 2000
    chances = draw.beta(alpha, beta, (repeats, problems))
    fractions = draw.binomial(samples, chances) / samples
    intervals = [mean_interval(row) for row in fractions.tolist()]
    covered = sum(low <= mean <= high for low, high in intervals) / repeats
    assert 0.93 < covered < 0.97  # its own standard error is 0.005


def test_samples_of_a_problem_are_no_independent_evidence() -> None:
    low, high = mean_interval([0.0, 1.0] * 14 + [0.5, 0.5])  # 30 problems of 32 samples, nearly all alike
    naive_low, naive_high = wilson_interval(480, 960)
    assert high - low > 4 * (naive_high - naive_low)


def test_the_interval_of_flags_is_wilsons() -> None:
    assert mean_interval([1.0] * 3 + [0.0] * 7) == wilson_interval(3, 10)


def test_the_sign_test_is_exact() -> None:
    assert sign_test(0, 0) == 1
    assert sign_test(5, 5) == 1
    assert sign_test(10, 0) == 2 / 2**10
    assert sign_test(1, 8) == pytest.approx(2 * (1 + 9) / 2**9)
    assert sign_test(3000, 2000) < 1e-40


def test_paired_comparison_finds_difference_within_problem_noise() -> None:
    first = [0.0, 1.0] * 50
    second = first.copy()
    second[0] = second[2] = second[4] = second[6] = second[8] = second[10] = second[12] = 1.0
    found = compare_paired(first, second)
    assert found.difference == pytest.approx(0.07)
    assert (found.better, found.worse, found.problems) == (7, 0, 100)
    assert found.low > 0
    assert found.p_value == 2 / 2**7
    back = compare_paired(second, first)
    assert (back.difference, back.low, back.high) == (-found.difference, -found.high, -found.low)
    with pytest.raises(ValueError, match="same problems"):
        compare_paired(first, second[:-1])


@pytest.mark.parametrize(
    ("accuracies", "problems", "expected"),
    [
        ([0.963, 0.961, 0.959], 512, 2),  # a standard error is 0.0083
        ([0.963, 0.955, 0.954], 512, 1),
        ([0.963, 0.961, 0.959], 5000, 1),  # and 0.0027 here
        ([0.4, 0.9, 0.3], 512, 1),  # collapsed
        ([0.5, 1.0, 1.0, 0.99], 10, 2),  # nothing incorrect leaves no error
        ([0.0, 0.0], 10, 1),
    ],
)
def test_latest_of_indistinguishable_accuracies_is_chosen(
    accuracies: list[float], problems: int, expected: int
) -> None:
    assert latest_within_one_standard_error(accuracies, [problems] * len(accuracies)) == expected


def test_the_standard_error_is_that_of_the_best_ones_problems() -> None:
    assert latest_within_one_standard_error([0.9, 0.88], [100, 10_000]) == 1
    assert latest_within_one_standard_error([0.9, 0.88], [10_000, 100]) == 0
    assert latest_within_one_standard_error([0.9, 0.9, 0.88], [100, 10_000, 100]) == 1  # of two bests, the surer


@pytest.mark.parametrize(("accuracies", "problems"), [([], []), ([0.5], [10, 10])])
def test_no_validation_has_no_best(accuracies: list[float], problems: list[int]) -> None:
    with pytest.raises(ValueError, match="accuracies of"):
        latest_within_one_standard_error(accuracies, problems)
