"""pass@n, Best@n and majority@n, by counting subsets and by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest

from trl_ext.evaluation.pass_at_n import best_at_n, consensus_at_n, first_n, majority_at_n, pass_at_n, prefers_incorrect

RNG = np.random.default_rng(0)
CORRECT = RNG.random((40, 6)) < RNG.random((40, 1))
SCORE = RNG.normal(size=(40, 6))


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_n_is_the_mean_over_all_subsets(n: int) -> None:
    subsets = [CORRECT[:, list(chosen)].any(axis=1) for chosen in combinations(range(6), n)]
    assert pass_at_n(CORRECT, n) == pytest.approx(np.mean(subsets, axis=0))


def test_one_sample_is_one_sample_by_any_rule() -> None:
    first = CORRECT[:, 0].astype(float)
    answers = [["yes" if flag else "no" for flag in row] for row in CORRECT]
    for found in (first_n(CORRECT, 1), best_at_n(CORRECT, SCORE, 1), majority_at_n(answers, CORRECT, 1)):
        assert (found == first).all()
    assert pass_at_n(CORRECT, 1) == pytest.approx(CORRECT.mean(axis=1))


@pytest.mark.parametrize("n", range(1, 7))
def test_best_at_n_follows_the_score_and_is_at_most_first_n(n: int) -> None:
    for row in range(len(CORRECT)):
        chosen = max(range(n), key=lambda i: SCORE[row, i])
        assert best_at_n(CORRECT, SCORE, n)[row] == CORRECT[row, chosen]
    assert (best_at_n(CORRECT, SCORE, n) <= first_n(CORRECT, n)).all()
    assert (best_at_n(CORRECT, CORRECT.astype(float), n) == first_n(CORRECT, n)).all()


def test_of_equal_scores_the_first_wins() -> None:
    assert best_at_n(np.array([[False, True], [True, False]]), np.zeros((2, 2)), 2).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        (["1", "2", "2"], [True, False, False], 0.0),
        (["2", "1", "1 "], [False, True, True], 1.0),
        (["2", "1"], [False, True], 0.5),  # as frequent: either
        (["1", "2", "1", "2", "3"], [True, False, True, False, False], 0.5),
        (["1", "2", "3"], [False, True, False], 1 / 3),
        ([None, None, "3"], [False, False, True], 1.0),  # no answer is no vote
        ([None, None, None], [False, False, False], 0.0),
    ],
)
def test_the_most_frequent_answer_decides(answers: list[str | None], correct: list[bool], expected: float) -> None:
    assert majority_at_n([answers], np.array([correct]), len(answers)).tolist() == [expected]


def test_answers_that_mean_the_same_are_one_vote() -> None:
    answers = [["1/2", "3", r"\frac12", "3", "0.5", "3.0"]]
    correct = np.array([[True, False, True, False, True, False]])
    assert majority_at_n(answers, correct, 6).tolist() == [0.0]  # of 2, 1, 1, 1, 1 votes

    def equal(pairs: Sequence[tuple[str, str]]) -> list[bool]:
        assert all("2" not in one for pair in pairs for one in pair), "what is correct is one vote without asking"
        return [float(one) == float(other) for one, other in pairs]

    assert consensus_at_n(answers, correct, 6, equal).tolist() == [0.5]  # three votes each
    assert consensus_at_n(answers, correct, 5, equal).tolist() == [1.0]
    assert consensus_at_n([[None, None]], np.array([[False, False]]), 2, equal).tolist() == [0.0]


def test_classes_join_along_a_chain_in_either_direction() -> None:
    follows = {("b", "a"), ("c", "b")}  # by a grader for which no other order holds
    answers, correct = [["a", "b", "c", "d", "d"]], np.array([[False, False, False, True, True]])
    votes = consensus_at_n(answers, correct, 5, lambda pairs: [pair in follows for pair in pairs])
    assert votes.tolist() == [0.0]  # a, b and c are three against two
    assert consensus_at_n(answers, correct, 5, lambda pairs: [False] * len(pairs)).tolist() == [1.0]


def test_how_often_the_likelihood_prefers_an_incorrect_sample() -> None:
    correct = np.array([[True, False], [True, False], [True, True], [False, False]])
    assert prefers_incorrect(correct, np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])) == 0.5
    assert math.isnan(prefers_incorrect(correct[2:], SCORE[:2, :2]))


@pytest.mark.parametrize("n", [0, 7])
def test_an_n_that_there_is_not_is_refused(n: int) -> None:
    for call in (lambda: pass_at_n(CORRECT, n), lambda: first_n(CORRECT, n), lambda: best_at_n(CORRECT, SCORE, n)):
        with pytest.raises(ValueError, match=f"between 1 and 6, .* got {n}"):
            call()
