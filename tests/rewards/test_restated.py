"""An answer that repeats the problem is not paid, however it is copied; with the problem known, in no form."""

from __future__ import annotations

import pytest

from scripts.benchmarks.copying import GRADES, POLICIES, RESPONSE, graded, holds_answer, mini_math, trained_shares
from trl_ext.evaluation.evaluator import grade_rows
from trl_ext.generation.completion import Completion
from trl_ext.rewards import GRADERS, REWARDS
from trl_ext.rewards.restated import occurs_in

ROWS = mini_math(300)
STRICT = [name for name in GRADES if name.startswith("strict") and "False" not in name]


def test_copies_are_paid_on_mini_math_where_they_are_the_answer() -> None:
    paid = 0
    for grader in STRICT:
        for policy, copy in POLICIES.items():
            for grade, (problem, answer) in zip(graded(ROWS, policy, grader), ROWS, strict=True):
                parts = set(copy(problem).split(" = "))
                is_answer = len(parts) == 1 and holds_answer(answer, parts.pop())
                assert grade.correct is is_answer, (grader, policy, problem, answer, grade)
                paid += grade.correct
    assert paid  # such as the 5 of "How many hats and 5 shirts"


@pytest.mark.parametrize("name", ["the first formula", "the last formula", "the longest formula"])
def test_copies_are_equal_to_a_quarter_of_the_answers(name: str) -> None:
    """So that the test above has something to refuse."""
    equal = graded(ROWS, name, "strict, worked_out=False")
    assert sum(grade.correct for grade in equal) > 0.2 * len(ROWS)


def test_training_does_not_reward_copies() -> None:
    assert trained_shares(worked_out=True, steps=40)["copied"] < 0.03
    assert trained_shares(worked_out=False, steps=40)["copied"] > 0.5


CASES = [  # problem, answer, reference answer, whether it is paid; all are equal
    (r"Reduce $\frac{24}{36}$.", r"\frac{24}{36}", r"\frac23", False),
    (r"Reduce $\frac{24}{36}$.", "24/36", r"\frac23", False),
    ("Reduce 24/36.", r"\dfrac{24}{36}", r"\frac23", False),
    (r"Reduce $\frac{24}{36}$.", r"\frac{4}{6}", r"\frac23", True),
    ("What is the probability of red?", r"\frac{24}{36}", r"\frac23", True),
    (r"Simplify $\sqrt{180}$.", r"\sqrt{180}", r"6\sqrt5", False),
    (r"How long is the hypotenuse?", r"\sqrt{180}", r"6\sqrt5", True),
    (r"Rationalize \[\frac{5}{\sqrt{3}}.\]", r"\frac{5}{\sqrt3}", r"\frac{5\sqrt3}{3}", False),
    (r"Write $0.\overline{54}$ as a fraction.", r"0.\overline{54}", r"\frac{6}{11}", False),
    (r"What is the ratio?", r"0.\overline{54}", r"\frac{6}{11}", True),
    (r"Write $\frac92$ as a decimal.", r"\frac{9}{2}", "4.5", False),
    (r"Write $\frac{63}{5}$ as a mixed number.", r"\frac{63}{5}", r"12\frac35", False),
    ("Factor $x^2+5x+6$.", "x^2+5x+6", "(x+2)(x+3)", False),
    ("Factor $x^2+5x+6$.", "6+5x+x^2", "(x+2)(x+3)", False),
    ("How large is the area?", "x^2+5x+6", "(x+2)(x+3)", True),
    ("Expand $3(x+4)$.", "3(x+4)", "3x+12", False),
    ("Expand $3(x+4)$.", "3(4+x)", "3x+12", False),
    ("What is the perimeter?", "3(x+4)", "3x+12", True),
    (r"If $x = -1$, what is $x$?", "x = -1", "-1", True),
    ("How many of the $12$ are red?", "12", "12", True),
    ("Which is larger, $1+x$ or $x$?", "1+x", "x+1", True),
    (r"Is it $\frac{x}{2}$?", r"\frac12x", r"\frac{x}{2}", True),
    (r"What is $17+25$?", "17+25", "42", False),
    (r"What is $17+25$?", "25+17", "42", False),
]


def test_with_the_problem_known_a_restated_answer_is_not_paid() -> None:
    problems, answers, references, paid = zip(*CASES, strict=True)
    responses = [RESPONSE.format(answer) for answer in answers]
    grades = GRADERS["strict"](responses, references, problems=problems)
    assert [grade.correct for grade in grades] == list(paid)
    assert all(grade.correct for grade in GRADERS["strict"](responses, references, worked_out=False, problems=problems))


@pytest.mark.parametrize(
    ("problem", "answer", "paid"),
    [
        ("What percent of 20 is 15?", r"75\%", True), ("What percentage of the 20 are red?", r"75\text{ percent}", True),
        ("In total, what was the percentage increase?", "75%", True), ("By what percent did it grow?", "75%", True),
        ("Is it 75%? Express it as a percentage.", "75%", True), ("What's the percentage of reds?", r"70\%+5\%", False),
        ("What percent is it?", "0.75", False), ("What percent is it?", r"76\%", False), ("What percent is it?", r"(70+5)\%", False),
        ("What is 20 percent of 375?", r"75\%", False), ("There are 50% reds. How many are red?", r"75\%", False),
        ("What is the price?", r"75\%", False),
    ],
)  # fmt: skip
def test_a_percent_sign_where_the_problem_asks_for_one(problem: str, answer: str, paid: bool) -> None:
    assert GRADERS["strict"]([RESPONSE.format(answer)], ["75"], problems=[problem])[0].correct is paid
    assert not GRADERS["strict"]([RESPONSE.format(answer)], ["75"])[0].correct


def test_training_and_evaluation_know_the_problem() -> None:
    problem, answer, reference, _ = CASES[0]
    response, user = RESPONSE.format(answer), [{"role": "user", "content": problem}]
    reward = REWARDS["strict"]
    for known in ({"prompts": [problem]}, {"prompts": [user]}, {"prompts": ["Reduce."], "problem": [problem]}):
        assert reward(completions=[response], answer=[reference], **known) == [0.0]
    assert reward(completions=[response], answer=[reference]) == [1.0]
    completion = Completion(text=response, tokens=1, finished=True)
    for name, correct in (("strict", 0.0), ("compatible", 0.0)):
        row = grade_rows([{"prompt": problem, "answer": reference}], [completion], GRADERS[name])[0]
        assert row["answer_reward"] == correct
    assert grade_rows([{"prompt": "How much?", "answer": reference}], [completion], GRADERS["strict"])[0]["reward"] == 1


@pytest.mark.parametrize(
    ("answer", "problem", "occurs"),
    [
        ("1/2", "11/22", False), ("1/2", "is 1/2.", True), (r"\frac12", "is 1/2", True), (r"\frac1{12}", r"\frac{1}{12}", True),
        (r"\frac{1}2", r"\dfrac 1 2", True), (r"\frac{1}{23}", r"\frac{12}{3}", False),
        ("x + 1", r"$x+1$", True), ("2x", "12x", False), ("5", "0.5", False), ("5", "5!", False), ("", "5", False),
        (r"2 \cdot 3", r"$2\times 3$", True), ("3", "3.", True), ("3", "3.5", False), (".,", "3", False),
    ],
)  # fmt: skip
def test_where_an_answer_stands_in_a_problem(answer: str, problem: str, occurs: bool) -> None:
    assert occurs_in(answer, problem) is occurs


def test_looking_for_an_answer_in_a_problem_takes_no_time() -> None:
    for character in ("\\", "{", "$", "a", "1", " ", r"\frac", r"\frac{", ".", "\\left"):
        assert occurs_in(character * 20_000, character * 20_000) in (True, False)
