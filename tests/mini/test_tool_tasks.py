"""The tasks whose base policies have read of tools: the problems are right, and what was read is what tools do."""

from __future__ import annotations

import re
from itertools import islice
from random import Random
from typing import Any

import pytest

from recipes.countdown_game import CountdownGame
from trl_ext.mini.problems import LEVELS, SPLITS
from trl_ext.mini.task import Task, first_rows
from trl_ext.mini.tasks import TASKS
from trl_ext.rewards.countdown import solves
from trl_ext.turns.calculator import calculator
from trl_ext.turns.protocols import Fences
from trl_ext.turns.tools import functions_of

_BLOCK = re.compile(r"```(\w+)\n(.*)\n```output\n(.*)\n```\n")


def task_of(name: str, **options: Any) -> Task:
    return TASKS.build(name, **options)()


def rows_of(task: Task, n: int = 300, split: str = "train") -> list[dict[str, Any]]:
    return first_rows(task.problems(split, 0), split, n)


def test_sums_are_right_and_levels_are_digits() -> None:
    rows = rows_of(task_of("sums", digits=11, terms=4))
    for row in rows:
        numbers = re.fullmatch(r"What is \$([\d+]+)\$\?", row["problem"])
        assert numbers is not None
        terms = numbers[1].split("+")
        assert int(row["answer"]) == sum(map(int, terms))
        assert {len(term) for term in terms} <= {2 * row["level"], 2 * row["level"] + 1}
    assert {row["level"] for row in rows} == set(LEVELS)
    assert {row["problem"].count("+") for row in rows} == {1, 2, 3}


@pytest.mark.parametrize("tool", ["calculator", "python"])
def test_a_call_that_was_read_is_one_that_is_understood(tool: str) -> None:
    task, rng = task_of("sums", tool=tool, calls=0.5), Random(0)
    worked = [(row, task.work(row, rng)) for row in rows_of(task)]
    called = [(row, text) for row, (text, _) in worked if text.startswith("```")]
    assert 100 < len(called) < 200
    assert all(stated == row["answer"] for row, (_, stated) in worked)
    (function,) = functions_of(tool)

    class Letters:
        def decode(self, ids: list[int]) -> str:
            return "".join(map(chr, ids))

    protocol: Any = Fences(Letters(), [function])  # type: ignore[arg-type]
    for row, text in called:
        asked, answer = text.split("```output")
        (call,) = protocol.calls([], [*map(ord, f"{asked}```output")])
        assert call.name == tool
        (code,) = call.arguments.values()
        assert f"${code}$" in row["problem"]
        assert answer == f"\n{calculator(code)}\n```\n"
    for row, (text, _) in worked:
        assert text.startswith("```") or text == row["solution"]


def test_games_that_were_read_are_those_that_are_played() -> None:
    task, rng = task_of("countdown_game", tries=5), Random(0)
    solved, tries = 0, set()
    for row in rows_of(task):
        assert solves(row["solution"], row["answer"]) == (True, "equal")
        text, stated = task.work(row, rng)
        blocks = _BLOCK.findall(text)
        assert "".join("```{}\n{}\n```output\n{}\n```\n".format(*block) for block in blocks) == text
        game = CountdownGame()
        game.reset(**row)
        assert [game.attempt(expression) for _, expression, _ in blocks] == [said for _, _, said in blocks]
        assert {name for name, _, _ in blocks} == {"attempt"}
        assert stated == blocks[-1][1]
        assert all(said != "equal" for _, _, said in blocks[:-1])
        solved += blocks[-1][2] == "equal"
        tries.add(len(blocks))
    assert tries == {1, 2, 3, 4, 5}
    assert 5 < solved < 150


@pytest.mark.parametrize("name", ["sums", "countdown_game"])
def test_no_problem_is_in_both_splits(name: str) -> None:
    def asked(split: str) -> set[str]:
        return {re.sub(r"\$(.*)\$", lambda m: str(sorted(re.findall(r"\d+", m[1]))), row["problem"]) if name ==
                "countdown_game" else row["problem"] for row in islice(task_of(name).problems(split, 0), 2000)}  # fmt: skip

    train, validation = map(asked, SPLITS)
    assert train
    assert validation
    assert not train & validation
    with pytest.raises(ValueError, match="unknown split 'test'"):
        task_of(name).problems("test", 0)


def test_sums_written_at_once_are_checked_as_steps() -> None:
    task = task_of("sums")
    steps = task.steps("What is $12+34$?", " 12+34=46, 12+34=47, 1+2=3 </think>")
    assert [(step.valid, step.true) for step in steps] == [(True, True), (False, False), (True, False)]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("sums", {"digits": 4}, "digits must be from 5"),
        ("sums", {"terms": 6}, "terms must be from 2 to 5"),
        ("sums", {"calls": 1.5}, "calls must be from 0 to 1"),
        ("sums", {"tool": "abacus"}, "tool must be one of calculator, python"),
        ("countdown_game", {"tries": 0}, "tries must be from 1 to 8"),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        task_of(name, **options)
