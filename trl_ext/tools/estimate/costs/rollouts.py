"""How many rows are decoded at each step of a rollout, and how many tokens they attend to.

Letters: N completions, S decoding steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from trl_ext.generation.decoding import MIN_ROWS_TO_SHRINK

_SPREAD = 0.6  # sigma of the log-normal that lengths are drawn from, as in scripts/benchmarks/step.py


@dataclass(frozen=True)
class Decoding:
    """A rollout's steps on one device."""

    rows: np.ndarray  # (S,) that are computed
    keys: np.ndarray  # (S,) tokens that these attend to, in all
    starts: int  # times that new rows join


def spread_lengths(n: int, mean: float, longest: int) -> np.ndarray:
    """(n,) lengths with this mean, in a fixed random order: the quantiles of a log-normal, cut at the longest.

    Raises:
        ValueError: the mean is above the longest, or below 1.
    """
    if not 1 <= mean <= longest:
        raise ValueError(f"a mean length of {mean} tokens does not lie between 1 and the longest, {longest}")
    standard = np.array([NormalDist().inv_cdf((i + 0.5) / n) for i in range(n)])
    low, high = -_SPREAD * 10.0, np.log(longest) + _SPREAD * 10.0
    for _ in range(60):  # the middle that gives the mean; cutting takes from it
        middle = (low + high) / 2
        lengths = np.clip(np.exp(middle + _SPREAD * standard), 1, longest)
        low, high = (middle, high) if lengths.mean() < mean else (low, middle)
    return np.random.default_rng(0).permutation(np.rint(lengths).astype(int))


def continuous_batch(lengths: Sequence[int], prompts: Sequence[int], slots: int) -> Decoding:
    """An engine's: a row that has ended makes room for the next one at once.

    Args:
        lengths: (N,) tokens of the completions, in the order in which they are begun.
        prompts: (N,) tokens of their prompts.
        slots: the most rows at a time.
    """
    ends = [0] * min(slots, len(lengths))
    begins = []
    for length in lengths:
        begin = heapq.heappop(ends)
        begins.append(begin)
        heapq.heappush(ends, begin + length)
    first, spans, steps = np.array(begins), np.array(lengths), max(ends)
    active, held = np.zeros(steps + 1), np.zeros(steps + 1)
    weight = np.array(prompts) - first + 1.0  # a row attends to its prompt and its tokens, the step's own included
    for change, place in ((1, first), (-1, first + spans)):
        np.add.at(active, place, change)
        np.add.at(held, place, change * weight)
    rows = active.cumsum()[:-1]
    return Decoding(rows, held.cumsum()[:-1] + rows * np.arange(steps), len(set(begins)))


def shrinking_batch(lengths: Sequence[int], prompts: Sequence[int], size: int) -> Decoding:
    """HF generate's as `hf_generate` calls it: padded, and rows that have ended leave once they are half of it."""
    rows: list[int] = []
    keys: list[int] = []
    starts = range(0, len(lengths), size)
    for start in starts:
        waiting = sorted(lengths[start : start + size])
        width, computed, ended = max(prompts[start : start + size]), len(waiting), 0
        for step in range(1, waiting[-1] + 1):
            rows.append(computed)
            keys.append(computed * (width + step))
            while ended < len(waiting) and waiting[ended] <= step:
                ended += 1
            left = len(waiting) - ended
            if computed >= MIN_ROWS_TO_SHRINK and left <= computed / 2:
                computed = left
    return Decoding(np.array(rows, dtype=float), np.array(keys, dtype=float), len(starts))
