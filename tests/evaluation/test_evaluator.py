from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from trl_ext.evaluation.evaluator import OUTCOMES, Report, evaluate, mean
from trl_ext.generation.completion import Completion
from trl_ext.rewards import GRADERS, REWARDS

CORRECT, INCORRECT, UNFORMATTED = "</think> <answer> 4 </answer>", "</think> <answer> 5 </answer>", "4"
PROBLEMS = [
    {"prompt": "a", "answer": "4", "level": 2, "subject": "sums"},
    {"prompt": "b", "answer": "4", "level": 1, "subject": "sums"},
    {"prompt": "c", "answer": "4", "level": 2, "subject": "facts"},
    {"prompt": "d", "answer": "4", "level": 2, "subject": "facts"},
]
COMPLETIONS = [
    Completion(CORRECT, 3, True), Completion(INCORRECT, 5, True), Completion(UNFORMATTED, 9, False),
    Completion(CORRECT, 3, True),
]  # fmt: skip


def report() -> Report:
    return evaluate(PROBLEMS, lambda prompts: COMPLETIONS, GRADERS["compatible"])


def test_row_is_the_problem_with_its_graded_response() -> None:
    rows = report().rows
    assert rows[1] == {
        **PROBLEMS[1], "response": INCORRECT, "format_reward": 1.0, "answer_reward": 0.0, "reward": 0.0, "tokens": 5,
        "finish_reason": "stop", "logp": None, "entropy_estimate": None, "outcome": "format_only", "extracted": " 5 ", "reason": "different value",
    }  # fmt: skip
    assert [row["outcome"] for row in rows] == ["correct", "format_only", "neither", "correct"]
    assert set(PROBLEMS[1]) == {"prompt", "answer", "level", "subject"}


def test_the_rollout_gets_all_prompts_once_and_in_order() -> None:
    seen: list[list[str]] = []

    def rollout(prompts: Sequence[str]) -> list[Completion]:
        seen.append(list(prompts))
        return COMPLETIONS

    evaluate(iter(PROBLEMS), rollout, GRADERS["compatible"])
    assert seen == [["a", "b", "c", "d"]]


@pytest.mark.parametrize("n", [3, 5])
def test_one_completion_per_problem_is_needed(n: int) -> None:
    with pytest.raises(ValueError, match="argument 2 is"):
        evaluate(PROBLEMS, lambda prompts: (COMPLETIONS * 2)[:n], GRADERS["compatible"])


def test_one_grade_per_completion_is_needed() -> None:
    with pytest.raises(ValueError, match="argument 3 is shorter"):
        evaluate(PROBLEMS, lambda prompts: COMPLETIONS, lambda *both: GRADERS["compatible"](*both)[:3])


def test_figures_by_hand() -> None:
    measured = report()
    assert measured.accuracy == 0.5
    assert measured.outcomes() == {"correct": 0.5, "format_only": 0.25, "neither": 0.25}
    assert list(measured.by("level").items()) == [(1, 0.0), (2, pytest.approx(2 / 3))]
    assert measured.summary() == {
        "problems": 4, "accuracy": 0.5, "outcomes": measured.outcomes(), "by_level": {"1": 0.0, "2": 2 / 3},
        "by_subject": {"facts": 0.5, "sums": 0.5}, "mean_tokens": 5.0, "truncated": 0.25,
        "mean_tokens_correct": 3.0, "mean_tokens_incorrect": 7.0, "entropy_estimate": None,
    }  # fmt: skip


def test_the_outcomes_are_all_there_and_add_up() -> None:
    assert list(report().outcomes()) == list(OUTCOMES)
    assert sum(report().outcomes().values()) == 1


def test_of_no_problems_everything_is_zero() -> None:
    nothing = evaluate([], lambda prompts: [], GRADERS["compatible"])
    assert nothing.summary()["accuracy"] == 0
    assert set(nothing.outcomes().values()) == {0}


def test_validation_grades_as_the_reward_does() -> None:
    texts = [completion.text for completion in COMPLETIONS]
    assert [row["reward"] for row in report().rows] == REWARDS["compatible"](texts, ["4"] * 4)
    boxes = [Completion(rf"\boxed{{{i}}}", 1, True) for i in (4, 5, 4, 6)]
    assert evaluate(PROBLEMS, lambda prompts: boxes, GRADERS.build("strict", answer_format="boxed")).accuracy == 0.5


def test_means_of_iterators() -> None:
    assert mean(iter([1.0, 2.0])) == 1.5
    assert mean(n > 1 for n in range(4)) == 0.5
    assert mean([]) == 0
    assert math.isnan(mean([math.nan]))
