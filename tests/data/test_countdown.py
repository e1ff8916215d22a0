"""Countdown: every problem can be solved, and the verifier believes arithmetic and nothing else."""

from __future__ import annotations

from fractions import Fraction
from itertools import islice, permutations
from typing import Any

import pytest

from tests.support.problems import load_problems
from trl_ext.data.countdown import problems, split_of
from trl_ext.rewards import GRADERS, REWARDS
from trl_ext.rewards.countdown import solves

TRUTH = "24: 3 5 7 8"


@pytest.mark.parametrize(
    ("expression", "right", "reason"),
    [
        ("3 * 8", True, "equal"),
        ("3*8 = 24", True, "equal"),
        ("8 / (5 - 3) * 7 - 4", False, "not given"),
        ("(7 + 5) * 3 - 8", False, "equals 28"),
        ("8 × 3", True, "equal"),
        (r"8 \times 3", True, "equal"),
        ("8 * (7 - 5 + 3 - 2)", False, "not given"),
        ("3 * 8 * (8 / 8)", False, "one too often"),
        ("24", False, "not given"),
        ("-(3 - 8) * 5 - 7 + 6", False, "not given"),
        ("-(3 - 8) * 5 - 7 / 7", False, "one too often"),
        ("8 + 7 + 5 + 3", False, "equals 23"),
        ("7 / 3 * 8", False, "equals 56/3"),
        ("3 / (5 - 5)", False, "not an expression"),
        ("", False, "ends too early"),
        ("3 8", False, "left over"),
        ("(3 * 8", False, "stays open"),
        ("3 ** 8", False, "where a number should be"),
        ("__import__('os').system('touch hacked')", False, "not an expression"),
        ("3 * 8.0", False, "not an expression"),
        ("(" * 199, False, "not an expression"),
        ("3*8" + " " * 300 + "x", False, "longer than 200"),
        ("9" * 150, False, "not an expression"),
    ],
)
def test_an_expression_of_the_numbers_that_reaches_the_target(expression: str, right: bool, reason: str) -> None:
    found = solves(expression, TRUTH)
    assert found[0] is right
    assert reason in found[1]


def test_a_truth_of_another_form_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"target: number number"):
        solves("3 * 8", "24")


def reachable(numbers: list[Fraction], target: int) -> bool:
    """By brute force, whether some of the numbers make the target."""
    if target in numbers:
        return True
    for i, j in permutations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        rest = [number for k, number in enumerate(numbers) if k not in (i, j)]
        if any(reachable([*rest, c], target) for c in [a + b, a - b, a * b, *([a / b] if b else [])]):
            return True
    return False


@pytest.mark.parametrize("split", ["train", "validation"])
def test_every_problem_is_solvable_and_matches_its_answer(split: str) -> None:
    for row in islice(problems(split), 40):
        target, numbers = row["answer"].split(": ")
        assert reachable([Fraction(number) for number in numbers.split()], int(target)), row
        assert target in row["problem"]
        assert numbers.replace(" ", ", ") in row["problem"]
        assert row["level"] == len(numbers.split())


def test_the_splits_share_nothing_and_a_seed_repeats() -> None:
    def keys(split: str, seed: int, n: int) -> list[Any]:
        rows = islice(problems(split, seed), n)
        return [tuple(sorted(row["answer"].replace(":", "").split())) for row in rows]

    train, validation = keys("train", 0, 3000), keys("validation", 1, 500)
    assert not set(train) & set(validation)
    assert all(split_of(target, [3, 5, 8]) == split_of(target, [8, 3, 5]) for target in range(200))
    drawn = [split_of(target, [1, 2, 3]) for target in range(1000)]
    assert 70 < drawn.count("validation") < 130
    for split, seed in (("train", 3), ("validation", 4)):
        for row in islice(problems(split, seed), 30):
            target, numbers = row["answer"].split(": ")
            assert split_of(int(target), [int(number) for number in numbers.split()]) == split
    assert keys("train", 5, 20) == keys("train", 5, 20) != keys("train", 6, 20)
    with pytest.raises(ValueError, match="unknown split 'test'"):
        next(problems("test"))


def test_it_is_a_dataset_a_grader_and_a_reward_by_name() -> None:
    row = load_problems("countdown", "train", "r1_zero", n=3)[0]
    assert row["prompt"].endswith("<think>")
    response = "so. </think> <answer> 3 * 8 </answer>"
    (verdict,) = GRADERS.build("countdown", answer_format="r1_zero")([response], [TRUTH])
    assert (verdict.well_formed, verdict.correct, verdict.answer) == (True, True, "3 * 8")
    assert REWARDS.build("countdown", answer_format="r1_zero")([response, "3 * 8"], [TRUTH, TRUTH]) == [1.0, 0.0]
