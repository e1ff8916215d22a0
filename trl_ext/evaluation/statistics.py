"""Confidence intervals for accuracies, and the paired comparison of two."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

Z95 = 1.959964  # two-sided 95 % of a normal distribution


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """95 % interval of a fraction, inside 0 and 1 even near them (Wilson 1927)."""
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(f"{successes} successes in {trials} trials")
    from scipy.stats import binomtest  # a second of imports

    interval = binomtest(successes, trials).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of independent values in 0..1, such as a problem's fraction of correct samples.

    The samples of a problem are correlated, and the problems are the independent draws. So it is Wilson's interval with
    the number of problems n* that would have the mean's standard error with one sample each, n* = m (1 - m) / error^2,
    and with Student's t (Korn and Graubard, Survey Methodology 24, 1998, for proportions in clustered surveys). It
    stays inside 0 and 1, and covers better than the mean and its standard error where problems are few. Where all
    values are 0 or 1, n* is their number and the interval is Wilson's own.
    """
    if all(value in (0, 1) for value in values):
        return wilson_interval(round(sum(values)), len(values))
    mean, error = _mean_and_error(values)
    spread = student_t_quantile(0.05, len(values) - 1) * error if len(values) > 1 else 1.0
    if spread == 0:
        return mean, mean
    shrink = spread**2 / (mean * (1 - mean))  # t^2 / n*
    center, half = mean + shrink / 2, math.sqrt(spread**2 + shrink**2 / 4)
    return max(0.0, (center - half) / (1 + shrink)), min(1.0, (center + half) / (1 + shrink))


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1) / len(values))


def latest_within_one_standard_error(accuracies: Sequence[float], trials: Sequence[int]) -> int:
    """Index of the last accuracy that is at most one standard error below the best one.

    Among models that a validation cannot tell apart, the best accuracy is the luckiest, and the longest trained model
    the better choice; Breiman et al. (Classification and Regression Trees, 1984, 3.4.3) choose the simplest so. The
    `trials` are the numbers of problems.
    """
    if not accuracies or len(accuracies) != len(trials):
        raise ValueError(f"{len(accuracies)} accuracies of {len(trials)} validations")
    best, problems = max(zip(accuracies, trials, strict=True))
    least = best - math.sqrt(best * (1 - best) / problems)
    return max(i for i, accuracy in enumerate(accuracies) if accuracy >= least)


@cache
def student_t_quantile(outside: float, freedom: int) -> float:
    """The t outside of -t .. t which a share `outside` of Student's distribution lies."""
    if not 0 < outside < 1 or freedom < 1:
        raise ValueError(f"a share between 0 and 1 and one degree of freedom at least, got {outside} and {freedom}")
    from scipy.stats import t

    return float(t.isf(outside / 2, freedom))


def paired_interval(
    differences: Sequence[float], outside: float = 0.05, least_deviation: float = 0.0
) -> tuple[float, float]:
    """Interval of the mean of two or more normal differences, such as at the same seeds (Student 1908).

    Args:
        outside: how often it may miss, such as 0.05 for 95 %.
        least_deviation: taken as their standard deviation where theirs is smaller, such as the step between two
            accuracies on so many problems: equal differences are no proof that all would be.
    """
    n = len(differences)
    if n < 2:
        raise ValueError(f"an interval needs two differences at least, got {n}")
    deviation = max(statistics.stdev(differences), least_deviation)
    half = student_t_quantile(outside, n - 1) * deviation / math.sqrt(n)
    center = statistics.mean(differences)
    return center - half, center + half


@dataclass(frozen=True)
class Comparison:
    """Two models on the same problems."""

    difference: float  # mean of the second minus mean of the first
    low: float  # lower end of the difference's 95 % interval
    high: float
    p_value: float  # of no difference, by the exact sign test on the problems where they differ (McNemar 1947)
    better: int  # problems on which the second is better
    worse: int
    problems: int


def compare_paired(first: Sequence[float], second: Sequence[float]) -> Comparison:
    """Compare per-problem scores in 0..1; pairing removes the noise of the problems' own difficulty."""
    if not first or len(first) != len(second):
        raise ValueError(f"{len(first)} scores against {len(second)}; they must be of the same problems")
    gains = [b - a for a, b in zip(first, second, strict=True)]
    mean, error = _mean_and_error(gains)
    better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    return Comparison(mean, mean - Z95 * error, mean + Z95 * error, sign_test(better, worse), better, worse, len(gains))


def sign_test(better: int, worse: int) -> float:
    """Two-sided probability of a split at least as uneven if either side were as likely."""
    if better + worse == 0:
        return 1.0
    from scipy.stats import binomtest

    return float(binomtest(better, better + worse).pvalue)
