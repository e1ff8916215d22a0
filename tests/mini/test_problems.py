"""mini-MATH: its problems are correct, in MATH's shape, endless, seeded, and split by their text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from fractions import Fraction
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from datasets import load_dataset

from trl_ext.mini.problems import LEVELS, SPLITS, SUBJECTS, problems, split_of, subject, write_jsonl
from trl_ext.mini.problems import mini_math as make_dataset
from trl_ext.rewards import ANSWER_FORMATS, GRADERS

CELLS = [(name, level) for name in sorted(SUBJECTS) for level in LEVELS]


def draws(name: str, level: int, n: int = 300) -> list[tuple[str, str, str]]:
    rng = Random(0)
    return [SUBJECTS[name](rng, level) for _ in range(n)]


def numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


# An independent reading of every problem: its numbers, in the order of the text, to the value of the answer.
VALUE: dict[tuple[str, int], Callable[..., Any]] = {
    ("Prealgebra", 1): lambda a, b: a + b,
    ("Prealgebra", 2): lambda a, b: a - b,
    ("Prealgebra", 3): lambda a, b: a * b,
    ("Prealgebra", 4): lambda a, b, c: a * b + c,
    ("Prealgebra", 5): lambda a, b, c: (a + b) * c,
    ("Algebra", 1): lambda a, s: s - a,
    ("Algebra", 2): lambda a, p: Fraction(p, a),
    ("Algebra", 4): lambda a, c, n: Fraction(n - c, a),
    ("Algebra", 5): lambda a, c, n: Fraction(n - c, a),
    ("Number Theory", 1): lambda a, b: (a + b) % 10,
    ("Number Theory", 2): lambda a, b: a * b % 10,
    ("Number Theory", 3): lambda a, b, c: (a * b + c) % 10,
    ("Number Theory", 4): lambda a, b, d: (a + b) % d,
    ("Number Theory", 5): math.gcd,
    ("Counting & Probability", 1): lambda a, b: a * b,
    ("Counting & Probability", 2): lambda a, b, c: a + b + c,
    ("Counting & Probability", 3): lambda a, b: Fraction(a, a + b),
    ("Counting & Probability", 4): lambda a, b: Fraction(a, a + b),
    ("Counting & Probability", 5): lambda a, b: Fraction(a, a + b) ** 2,
    ("Geometry", 2): lambda a, b: a * b,
    ("Geometry", 4): lambda a, b: 2 * (a + b),
}
SIDES = {"triangle": 3, "square": 4, "pentagon": 5, "hexagon": 6}


@pytest.mark.parametrize(("name", "level"), sorted(VALUE))
def test_answer_is_the_problem_value_with_fractions_reduced(name: str, level: int) -> None:
    for problem, _, answer in draws(name, level):
        value = Fraction(VALUE[name, level](*numbers(problem)))
        written = rf"\frac{{{value.numerator}}}{{{value.denominator}}}" if value.denominator > 1 else str(value)
        assert answer == written, problem


def test_the_answers_that_are_expressions_are_right() -> None:
    for problem, _, answer in draws("Algebra", 3):
        found = re.fullmatch(r"Expand \$(\d)\((\w) \+ (\d)\)\$\.", problem)
        assert found is not None
        assert answer == f"{found[1]}{found[2]}+{int(found[1]) * int(found[3])}"
    for problem, _, answer in draws("Geometry", 1):
        (shape,) = (s for s in SIDES if s in problem)
        assert int(answer) == SIDES[shape] * numbers(problem)[0]
    for problem, _, answer in draws("Geometry", 3):
        a, root, b = numbers(problem)
        assert answer == rf"{a * b}\sqrt{{{root}}}"
    for problem, _, answer in draws("Geometry", 5):
        a, b = numbers(problem)
        assert answer == rf"\sqrt{{{a * a + b * b}}}"
        assert all((a * a + b * b) % k**2 for k in range(2, 15)), "a root that simplifies has two correct answers"


def test_every_subject_and_level_has_its_value_checked() -> None:
    expressions = {("Algebra", 3), ("Geometry", 1), ("Geometry", 3), ("Geometry", 5)}
    assert set(CELLS) == set(VALUE) | expressions
    assert len(SUBJECTS) >= 5


@pytest.mark.parametrize(("name", "level"), CELLS)
def test_every_step_of_a_solution_is_true(name: str, level: int) -> None:
    for _, solution, _ in draws(name, level):
        for step in solution.split(", "):
            if "=" in step:
                left, right = step.split("=")
                assert value(left) == value(right), solution


def value(expression: str) -> int:
    """The value of sums, differences and products of whole numbers, products first."""
    total = 0
    for sign, term in re.findall(r"([+-]?)([\d*]+)", expression):
        total += (-1 if sign == "-" else 1) * math.prod(int(n) for n in term.split("*"))
    return total


@pytest.mark.parametrize("split", SPLITS)
def test_rows_have_math_columns_and_all_subjects_and_levels(split: str) -> None:
    rows = list(islice(problems(split, seed=1), 2000))
    assert {(r["subject"], r["level"]) for r in rows} == set(CELLS)
    for row in rows:
        assert list(row) == ["problem", "solution", "answer", "level", "subject"]
        assert row["solution"].endswith(row["answer"])
        assert (
            ANSWER_FORMATS["r1_zero"](f"{row['solution']} </think> <answer> {row['answer']} </answer>") == row["answer"]
        )


@pytest.mark.parametrize("grader", ["compatible", "strict"])
def test_every_answer_is_graded_correct_and_another_incorrect(grader: str) -> None:
    rows = list(islice(problems("validation", seed=1), 400))
    answers = [row["answer"] for row in rows]
    respelled = [
        a.replace(r"\frac", r"\dfrac ").replace(r"\sqrt", r"\sqrt ").replace("+", " + ") + "." for a in answers
    ]
    respelled = respelled if grader == "strict" else answers
    right = GRADERS[grader]([f"</think> <answer> {a} </answer>" for a in respelled], answers)
    assert [(v.answer, row["answer"]) for v, row in zip(right, rows, strict=True) if not v.correct] == []
    others = answers[1:] + answers[:1]
    wrong = GRADERS[grader]([f"</think> <answer> {a} </answer>" for a in others], answers)
    assert all(v.correct == (a == b) for v, a, b in zip(wrong, others, answers, strict=True))


def test_latex_answers_are_fractions_radicals_and_expressions() -> None:
    answers = [row["answer"] for row in islice(problems("train"), 1000)]
    assert any(a.startswith(r"\frac") for a in answers)
    assert any(r"\sqrt" in a for a in answers)
    assert any(re.fullmatch(r"\d\w\+\d+", a) for a in answers)


@pytest.mark.moderate
def test_train_and_validation_share_no_problem_for_any_seeds() -> None:
    train = {row["problem"] for seed in range(3) for row in islice(problems("train", seed), 5000)}
    held_out = {row["problem"] for seed in range(3) for row in islice(problems("validation", seed), 5000)}
    assert len(held_out) > 1000
    assert not train & held_out
    assert all(split_of(p) == "train" for p in train)


def test_mini_problems_are_reproducible_by_seed() -> None:
    first, again, other = ([r["problem"] for r in islice(problems("train", s), 50)] for s in (0, 0, 1))
    assert first == again != other


def test_validation_set_has_no_duplicates_and_is_balanced() -> None:
    rows = make_dataset("validation", 512)
    assert len(set(rows["problem"])) == 512
    shares = [rows["level"].count(level) / 512 for level in LEVELS]
    assert min(shares) > 0.15, shares  # 0.2 each, less what small cells cannot give


def test_jsonl_and_dataset_hold_the_same_rows(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "deeper" / "train.jsonl", "train", 20, seed=3)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == make_dataset("train", 20, seed=3).to_list()
    assert load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path)).to_list() == rows


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown split 'test'. Known: train, validation"):
        problems("test")
    with pytest.raises(ValueError, match=r"'Algebra' is taken. Known: Algebra, "):
        subject("Algebra")(SUBJECTS["Geometry"])


def test_more_validation_problems_than_there_are_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [f"What is {n} + 1?" for n in range(1000)]
    held_out = {problem for problem in few if split_of(problem) == "validation"}
    assert len(held_out) > 10
    for name in SUBJECTS:
        monkeypatch.setitem(SUBJECTS, name, lambda rng, level: (rng.choice(few), "1=1", "1"))
    assert set(make_dataset("validation", len(held_out))["problem"]) == held_out
    with pytest.raises(ValueError, match=f"more than the distinct problems of 'validation': about {len(held_out)}"):
        make_dataset("validation", len(held_out) + 1)


def test_subject_with_no_problem_for_a_split_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only = next(row["problem"] for row in problems("train"))
    monkeypatch.setitem(SUBJECTS, "Algebra", lambda rng, level: (only, "1=1", "1"))
    with pytest.raises(ValueError, match=r"'Algebra', level \d: no problem of the split 'validation' in 1000 draws"):
        list(islice(problems("validation"), 100))


def test_levels_are_longer_to_solve_as_they_rise() -> None:
    steps = [sum(s.count("=") for n in SUBJECTS for _, s, _ in draws(n, level)) for level in LEVELS]
    assert all(later > earlier for earlier, later in pairwise(steps[::2])), steps


def test_a_problem_is_in_the_same_split_in_every_process() -> None:
    """Python's own hash of a text differs from process to process."""
    splits = {"What is 2 + 3?": "validation", "a": "train", "b": "train", "c": "validation", "e": "train"}
    assert {problem: split_of(problem) for problem in splits} == splits
