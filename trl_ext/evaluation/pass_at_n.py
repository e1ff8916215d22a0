"""What more samples per problem buy: pass@N, Best@N and majority@N from one set of samples.

Letters: P problems, N samples of each, in the order in which they were drawn; `n` is at most N.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]


def pass_at_n(correct: Flags, n: int) -> Floats:
    """(P, N) -> (P,): chance that n of the N samples, drawn without repetition, include a correct one.

    Unbiased, 1 - C(N-c, n) / C(N, n) with c correct samples (arXiv:2107.03374, equation 1).
    """
    total = _check(correct, n)
    counts = [int(row.sum()) for row in correct]
    return np.array([1 - math.comb(total - c, n) / math.comb(total, n) for c in counts], np.float64)


def first_n(correct: Flags, n: int) -> Floats:
    """(P, N) -> (P,): whether one of the first n samples is correct."""
    _check(correct, n)
    return np.asarray(correct[:, :n].any(axis=1), np.float64)


def best_at_n(correct: Flags, score: Floats, n: int) -> Floats:
    """(P, N), (P, N) -> (P,): whether the one of the first n samples with the highest score is correct.

    The score is the mean log-probability per token where the model chooses for itself. Of equal scores the first wins,
    so that Best@1 is the first sample.
    """
    _check(correct, n)
    chosen = np.argmax(score[:, :n], axis=1)
    return np.asarray(correct[np.arange(len(correct)), chosen], np.float64)


def majority_at_n(answers: Sequence[Sequence[str | None]], correct: Flags, n: int) -> Floats:
    """(P, N), (P, N) -> (P,): whether the most frequent answer of the first n samples is correct.

    Answers count as one where they are written alike but for white space; None does not vote; of equally frequent
    ones the first wins (self-consistency, arXiv:2203.11171).
    """
    _check(correct, n)
    return np.array([_majority(row[:n], flags[:n]) for row, flags in zip(answers, correct, strict=True)], np.float64)


def _majority(answers: Sequence[str | None], correct: Flags) -> float:
    written = [None if answer is None else "".join(answer.split()) for answer in answers]
    votes = Counter(text for text in written if text is not None)
    return float(correct[written.index(votes.most_common(1)[0][0])]) if votes else 0.0


def prefers_incorrect(correct: Flags, score: Floats) -> float:
    """Of the problems with correct and incorrect samples, the fraction where an incorrect one scores highest.

    Not a number if there is no such problem.
    """
    mixed = correct.any(axis=1) & ~correct.all(axis=1)
    if not mixed.any():
        return math.nan
    return 1.0 - float(best_at_n(correct[mixed], score[mixed], correct.shape[1]).mean())


def _check(correct: Flags, n: int) -> int:
    """Return N; n has to be between 1 and it."""
    total = int(correct.shape[1])
    if not 1 <= n <= total:
        raise ValueError(f"n must be between 1 and {total}, the samples per problem, got {n}")
    return total
