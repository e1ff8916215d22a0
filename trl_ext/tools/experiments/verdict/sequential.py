"""Seeds are added until an interval decides: looks fixed beforehand, whose intervals hold all at once.

The intervals are repeated confidence intervals (Jennison and Turnbull 1984, Controlled Clinical Trials 5:33-45): the
true mean is within those of all looks with the probability stated, so whenever one stops, and for whatever reason, the
last one holds. The error is spent in proportion to the seeds, alpha * n / N, which is Kim and DeMets' power family with
exponent 1 (1987, Biometrika 74:149-154). Each look has its share as an ordinary t interval. By Bonferroni's inequality
all of them miss no more often than alpha, with normal differences and any number of seeds; the joint distribution of
the looks (Jennison and Turnbull 1991, Biometrika 78:133-141), which takes tables, would make them narrower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from trl_ext.evaluation.statistics import paired_interval, student_t_quantile

Draws = NDArray[np.float64]
BETTER, WORSE, EQUAL, OPEN = "better", "worse", "equal", "open"
_LOOKS, _BETWEEN = 4, 2  # looks at most, and seeds between two of them at least: each look widens all others
MOST_SEARCHED = 60  # seeds
_DRAWS = 4000  # of a simulation
_WANTED = 0.8  # power


@dataclass(frozen=True)
class Design:
    """When the differences are looked at, and how often any of the intervals may miss."""

    most: int  # seeds
    intervals: int = 1  # that are read at every look, over which the error is divided: none depends on another's
    first: int = 4  # seeds at the first look: three standard deviations are hardly one
    alpha: float = 0.05

    def __post_init__(self) -> None:
        if not 2 <= self.first <= self.most:
            raise ValueError(f"the first look must be at 2 seeds or more and {self.most} at most, got {self.first}")

    @property
    def looks(self) -> list[int]:
        """Numbers of seeds, evenly from the first to the last; where few lie between, the last one only."""
        gaps = min(_LOOKS - 1, (self.most - self.first) // _BETWEEN)
        return [round(self.most - (self.most - self.first) * i / gaps) for i in range(gaps, 0, -1)] + [self.most]

    @property
    def levels(self) -> dict[int, float]:
        """How often one interval of each look may miss."""
        before = [0, *self.looks]
        share = self.alpha / self.intervals / self.most
        return {n: share * (n - last) for n, last in zip(self.looks, before, strict=False)}


def repeated_interval(
    differences: Sequence[float], design: Design, least_deviation: float = 0.0
) -> tuple[float, float] | None:
    """What all looks so far leave of the mean difference; None before the first one.

    The differences are in the order of the seeds. Where the looks contradict one another, which is one of the misses
    that were allowed for, it is the last look's.
    """
    levels = {n: level for n, level in design.levels.items() if n <= len(differences)}
    intervals = [paired_interval(differences[:n], level, least_deviation) for n, level in levels.items()]
    if not intervals:
        return None
    low, high = max(low for low, _ in intervals), min(high for _, high in intervals)
    return (low, high) if low <= high else intervals[-1]


def decision(interval: tuple[float, float] | None, margin: float) -> str:
    """What an interval says: `BETTER`, `WORSE`, `EQUAL` (any difference is below the margin), or still `OPEN`."""
    if interval is None:
        return OPEN
    low, high = interval
    if low > 0:
        return BETTER
    if high < 0:
        return WORSE
    return EQUAL if -margin < low and high < margin else OPEN


def first_alarms(draws: Draws, design: Design, least_deviation: float = 0.0) -> NDArray[np.int64]:
    """For each row of differences the seeds after which its interval excludes 0, positive if above; 0 if never."""
    alarms = np.zeros(len(draws), dtype=np.int64)
    for n, level in design.levels.items():
        mean = draws[:, :n].mean(axis=1)
        deviation = np.maximum(draws[:, :n].std(axis=1, ddof=1), least_deviation)
        half = student_t_quantile(level, n - 1) * deviation / np.sqrt(n)
        alarms = np.where((alarms == 0) & (abs(mean) > half), n * np.sign(mean).astype(np.int64), alarms)
    return alarms


def power(design: Design, effect: float, deviation: float) -> float:
    """How often a true mean difference is found, in its direction, if the differences are normal; by simulation."""
    rows = np.random.default_rng(0).normal(effect, deviation, (_DRAWS, design.most))
    return float((first_alarms(rows, design) * np.sign(effect) > 0).mean())


def seeds_needed(effect: float, deviation: float, intervals: int) -> int | None:
    """The fewest seeds at most with which a difference is found that often; None if `MOST_SEARCHED` are too few."""
    normal = NormalDist()
    distance = normal.inv_cdf(1 - Design.alpha / intervals / 2) + normal.inv_cdf(_WANTED)
    fewest = math.ceil((distance * deviation / effect) ** 2)  # of a single look with a known deviation
    for most in range(max(Design.first, fewest), MOST_SEARCHED + 1):
        if power(Design(most, intervals), effect, deviation) >= _WANTED:
            return most
    return None
