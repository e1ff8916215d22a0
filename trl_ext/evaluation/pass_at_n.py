"""What more samples per problem buy: pass@N, Best@N, majority@N and consensus@N from one set of samples.

Letters: P problems, N samples of each, in the order in which they were drawn; `n` is at most N.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

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
    """(P, N), (P, N) -> (P,): chance that the most frequent answer of the first n samples is correct.

    Answers count as one where they are written alike but for white space; None does not vote; of k equally frequent
    ones each is chosen with chance 1/k (self-consistency, arXiv:2203.11171; papers call it maj@n).
    """
    written = [[None if answer is None else "".join(answer.split()) for answer in row] for row in answers]
    return _voted(written, correct, n)


def consensus_at_n(
    answers: Sequence[Sequence[str | None]],
    correct: Flags,
    n: int,
    equal: Callable[[Sequence[tuple[str, str]]], Sequence[bool]],
) -> Floats:
    """(P, N), (P, N) -> (P,): `majority_at_n` of answers that mean the same, not of those that are written alike.

    Args:
        equal: pairs of answers -> whether each pair means the same, by the grader that judged them. Two answers of a
            problem are one vote if either is right where the other is the reference answer, and so on along a chain;
            the correct ones are one vote.
    """
    groups = [_united(row[:n], flags[:n], equal) for row, flags in zip(answers, correct, strict=True)]
    return _voted(groups, correct, n)


def _united(
    answers: Sequence[str | None], correct: Flags, equal: Callable[[Sequence[tuple[str, str]]], Sequence[bool]]
) -> list[str | None]:
    """For each answer, the first one that it means the same as."""
    first = dict.fromkeys(answer for answer in answers if answer is not None)
    right = [answer for answer, is_right in zip(answers, correct, strict=True) if is_right and answer is not None]
    wrong = [answer for answer in first if answer not in right]
    stands_for = {answer: answer for answer in first} | dict.fromkeys(right, right[0] if right else None)
    pairs = [(one, other) for i, one in enumerate(wrong) for other in wrong[:i]]
    same = equal([*pairs, *((other, one) for one, other in pairs)])
    for (one, other), *either in zip(pairs, same[: len(pairs)], same[len(pairs) :], strict=True):
        if any(either):
            old, new = stands_for[one], stands_for[other]
            stands_for = {answer: new if group == old else group for answer, group in stands_for.items()}
    return [None if answer is None else stands_for[answer] for answer in answers]


def _voted(groups: Sequence[Sequence[str | None]], correct: Flags, n: int) -> Floats:
    _check(correct, n)
    return np.array([_majority(row[:n], flags[:n]) for row, flags in zip(groups, correct, strict=True)], np.float64)


def _majority(groups: Sequence[str | None], correct: Flags) -> float:
    votes = Counter(group for group in groups if group is not None)
    most = max(votes.values(), default=0)
    chosen = [group for group, count in votes.items() if count == most]
    return float(np.mean([correct[groups.index(group)] for group in chosen])) if chosen else 0.0


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
