"""The tasks of many steps: problems that are right, lapses as chosen, and a check that finds the step that is wrong."""

from __future__ import annotations

import itertools
import re
from random import Random
from statistics import mean
from typing import Any

import pytest

from tests.support.problems import load_problems
from trl_ext.mini.problems import LEVELS, SPLITS
from trl_ext.mini.task import Task, first_rows
from trl_ext.mini.tasks import TASKS
from trl_ext.rewards import GRADERS

STEPWISE = ("arithmetic", "cups")


def task_of(name: str, **options: Any) -> Task:
    task = TASKS.build(name, **options)()
    assert isinstance(task, Task)
    return task


def rows_of(task: Task, n: int = 300, split: str = "train", seed: int = 0) -> list[dict[str, Any]]:
    return first_rows(task.problems(split, seed), split, n)


def arithmetic_by_hand(problem: str) -> str:
    """With Python's own arithmetic, on one growing expression."""
    start, operations = re.findall(r"\$([^$]+)\$", problem)
    expression = start
    for operation in operations.split(", "):
        expression = f"({expression}{operation})"
    return str(eval(expression))


def cups_by_hand(problem: str) -> str:
    """By following each cup to its place, instead of the row."""
    exchanged, start = re.findall(r"\$([^$]+)\$", problem)
    ends = []
    for place, cup in enumerate(start, start=1):
        for pair in exchanged.split(", "):
            a, b = (ord(letter) - ord("A") + 1 for letter in pair)
            place = b if place == a else a if place == b else place
        ends.append((place, cup))
    return "".join(cup for _, cup in sorted(ends))


@pytest.mark.parametrize(("name", "by_hand"), [("arithmetic", arithmetic_by_hand), ("cups", cups_by_hand)])
def test_the_answer_is_that_of_another_way_to_solve_it(name: str, by_hand: Any) -> None:
    for row in rows_of(task_of(name)):
        assert row["answer"] == by_hand(row["problem"]), row["problem"]
        assert row["solution"].endswith(f"={row['answer']}")


@pytest.mark.parametrize("name", STEPWISE)
def test_every_level_has_its_fifth_of_the_steps(name: str) -> None:
    longest = 10
    found = {(row["level"], row["solution"].count("=")) for row in rows_of(task_of(name, longest=longest), 1000)}
    assert found == {(level, n) for level in LEVELS for n in (2 * level - 1, 2 * level)}


@pytest.mark.parametrize("name", STEPWISE)
def test_solutions_differ_in_length_by_an_order_of_magnitude(name: str) -> None:
    lengths = [len(row["solution"]) for row in rows_of(task_of(name))]
    assert max(lengths) > 10 * min(lengths)


@pytest.mark.parametrize("name", STEPWISE)
def test_splits_share_nothing_and_validation_repeats_nothing(name: str) -> None:
    task = task_of(name, longest=5)
    train, held_out = ({r["problem"] for r in rows_of(task, 1500, split)} for split in SPLITS)
    assert len(held_out) == 1500
    assert not train & held_out
    again, other = (rows_of(task, 20, seed=seed) for seed in (0, 1))
    assert again == rows_of(task, 20) != other
    with pytest.raises(ValueError, match=r"unknown split 'test'. Known: train, validation"):
        task.problems("test", 0)


@pytest.mark.parametrize("name", STEPWISE)
def test_operations_are_one_to_one_so_no_step_heals_an_error(name: str) -> None:
    task = task_of(name, lapses=0.2, incorrect="equal")
    rng = Random(0)
    for row in rows_of(task):
        working, answer = task.work(row, rng)
        wrong = [not step.valid for step in task.steps(row["problem"], working)]
        if sum(wrong) == 1:
            assert answer != row["answer"]


@pytest.mark.parametrize("name", STEPWISE)
@pytest.mark.parametrize(("incorrect", "sign"), [("longer", 1), ("shorter", -1), ("equal", 0)])
def test_incorrect_workings_are_as_long_as_chosen(name: str, incorrect: str, sign: int) -> None:
    task = task_of(name, incorrect=incorrect, lapses=0.1)
    rng, extra = Random(0), {True: [], False: []}  # type: tuple[Random, dict[bool, list[int]]]
    for row in rows_of(task, 1000):
        working, answer = task.work(row, rng)
        assert re.split("[= ]", working)[-1] == answer, "the answer is the last state that is written"
        extra[answer == row["answer"]].append(len(working) - len(row["solution"]))
    assert len(extra[False]) > 200
    difference = mean(extra[False]) - mean(extra[True])
    assert abs(difference) < 1 if not sign else sign * difference > 10


def test_states_of_arithmetic_stay_in_their_range() -> None:
    states = [int(text) for row in rows_of(task_of("arithmetic")) for text in re.findall(r"=(-?\d+)", row["solution"])]
    assert (min(states), max(states)) == (1, 30)


def test_workings_without_lapses_are_the_solutions() -> None:
    for name in STEPWISE:
        task = task_of(name, lapses=0.0)
        for row in rows_of(task, 50):
            assert task.work(row, Random(0)) == (row["solution"], row["answer"])
            found = task.steps(row["problem"], f" {row['solution']} </think> <answer> 1=1 </answer>")
            assert len(found) == row["solution"].count("=")
            assert all(step.valid and step.true for step in found)


ARITHMETIC = "Start with $12$ and apply $+5, *3, -4$ in turn. What is the result?"
CUPS = "Exchange the cups at the places $AB, AC$ in turn. Which order does $123$ turn into?"


@pytest.mark.parametrize(
    ("name", "problem", "response", "expected"),
    [
        ("arithmetic", ARITHMETIC, "+5=17, *3=51, -4=47", "vt vt vt"),
        ("arithmetic", ARITHMETIC, "+5=18, *3=54, -4=50", ".. v. v."),  # the one error, and what follows from it
        ("arithmetic", ARITHMETIC, "+5=17, -4=13, -4=9", "vt .. v."),  # an operation that is not the next one
        ("arithmetic", ARITHMETIC, "+5=17, *3=51, -4=47, -4=43", "vt vt vt .."),  # a step too many
        ("arithmetic", ARITHMETIC, "+5=18, wait, +5=17, *3=51", ".. vt vt"),
        ("arithmetic", ARITHMETIC, "+5=17, wait, +5=22, *3=66", "vt .. v."),
        ("arithmetic", ARITHMETIC, "+5=17, wait, *3=51", "vt .."),  # done again, but another one
        ("arithmetic", ARITHMETIC, "+5=17, so 47", "vt vt"),
        ("arithmetic", ARITHMETIC, "+5=17, so 48 </think>", "vt .."),
        ("arithmetic", ARITHMETIC, "+5=17, so 47, -4=43", "vt vt .."),
        ("arithmetic", ARITHMETIC, "wait, +5=17", "vt"),
        ("arithmetic", ARITHMETIC, "+5=170, *3=51, -4=47", ".. .t vt"),
        ("arithmetic", ARITHMETIC, "+05=17, *3=51", ".. vt"),
        ("arithmetic", ARITHMETIC, "no step at all", ""),
        (
            "arithmetic",
            ARITHMETIC,
            "+5=117, *3=51",
            ".. .t",
        ),
        ("cups", CUPS, "AB=213, AC=312", "vt vt"),
        ("cups", CUPS, "AB=213, AC=321", "vt .."),
        ("cups", CUPS, "AB=132, AC=231", ".. v."),
        ("cups", CUPS, "AB=2, AC=312", ".. .t"),
    ],
)
def test_steps_of_a_response_are_checked_one_by_one(name: str, problem: str, response: str, expected: str) -> None:
    task = task_of(name, **({"cups": 3} if name == "cups" else {}))
    found = task.steps(problem, response)
    assert " ".join(f"{'v' if s.valid else '.'}{'t' if s.true else '.'}" for s in found) == expected
    assert all(a.end <= b.start for a, b in itertools.pairwise(found))
    assert all("=" in response[s.start : s.end] or response[s.start : s.end].startswith("so ") for s in found)


def test_equations_of_mini_math_are_checked_on_their_own() -> None:
    found = task_of("mini_math").steps("", " 2*3=6, 6+5=12, 9-4=5 </think>")
    assert [(s.valid, s.true) for s in found] == [(True, True), (False, False), (True, True)]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("arithmetic", {"longest": 4}, r"longest must be at least 5, a step for each level, got 4"),
        ("arithmetic", {"incorrect": "wrong"}, r"incorrect must be one of longer, shorter, equal, got 'wrong'"),
        ("cups", {"lapses": 1.0}, r"lapses must be at least 0 and below 1, got 1.0"),
        ("arithmetic", {"largest": 100}, r"largest must be from 10 to 99, got 100"),
        ("cups", {"cups": 2}, r"cups must be from 3 to 9, got 2"),
        ("arithmetic", {"cups": 4}, r"unknown option of embedded task 'arithmetic' 'cups'"),
        (
            "countdown",
            {"cups": 4},
            r"dataset_options is for mini_math, arithmetic, cups, sums, countdown_game, and the dataset is 'countdown'",
        ),
    ],
)
def test_options_that_cannot_be_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_problems(name, "train", "r1_zero", n=3, dataset_options=options)


@pytest.mark.parametrize("name", STEPWISE)
def test_each_is_a_dataset_by_name_with_gradable_answers(name: str) -> None:
    rows = load_problems(name, "validation", "r1_zero", n=40, dataset_options={"longest": 6})
    assert max(row["problem"].count(",") for row in rows) == 5
    for grader in ("strict", "compatible"):
        right = [f"</think> <answer> {row['answer']} </answer>" for row in rows]
        graded = GRADERS[grader](right, rows["answer"])
        assert all(verdict.correct for verdict in graded)
        others = rows["answer"][1:] + rows["answer"][:1]
        swapped = GRADERS[grader]([f"</think> <answer> {other} </answer>" for other in others], rows["answer"])
        assert [v.correct for v in swapped] == [a == b for a, b in zip(others, rows["answer"], strict=True)]
