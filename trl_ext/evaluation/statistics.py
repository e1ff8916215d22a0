"""Confidence intervals for accuracies, and the paired comparison of two."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959964  # two-sided 95 % of a normal distribution


def wilson_interval(successes: int, trials: int, z: float = Z95) -> tuple[float, float]:
    """Interval of a fraction, `z` standard errors to each side, inside 0 and 1 even near them (Wilson 1927)."""
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(f"{successes} successes in {trials} trials")
    fraction, penalty = successes / trials, z * z / trials
    center = (fraction + penalty / 2) / (1 + penalty)
    half = z * math.sqrt(fraction * (1 - fraction) / trials + penalty / (4 * trials)) / (1 + penalty)
    return max(0.0, center - half), min(1.0, center + half)


def mean_interval(values: Sequence[float], z: float = Z95) -> tuple[float, float]:
    """Interval of the mean of independent values in 0..1, such as a problem's fraction of correct samples.

    Where all values are 0 or 1 this is Wilson's, else the mean and its standard error.
    """
    if all(value in (0, 1) for value in values):
        return wilson_interval(round(sum(values)), len(values), z)
    mean, error = _mean_and_error(values)
    return max(0.0, mean - z * error), min(1.0, mean + z * error)


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


# 0.975 quantiles of Student's t by degrees of freedom; for more of them the last one, which is wider than theirs.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def paired_interval(differences: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of two or more normal differences, such as at the same seeds (Student 1908)."""
    n = len(differences)
    if n < 2:
        raise ValueError(f"an interval needs two differences at least, got {n}")
    half = _T95[min(n - 1, len(_T95)) - 1] * statistics.stdev(differences) / math.sqrt(n)
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
    trials = better + worse
    tail = sum(math.comb(trials, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**trials)
