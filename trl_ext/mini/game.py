"""Countdown as a game: tries are answered by what they come to, so that a policy can look for a solution.

The base policy has read games whose tries are drawn at random, written as calls in fences
(`trl_ext.turns.protocols.Fences`) of `attempt`, a method of the environment in `recipes/countdown_game.py`.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from operator import add, mul, sub
from random import Random

from trl_ext.mini.problems import SPLITS, split_of
from trl_ext.mini.task import Row, Step, Task
from trl_ext.rewards.countdown import solves

_OPERATORS = {"+": add, "-": sub, "*": mul}


def countdown_game(*, tries: int = 4) -> Task:
    """Three numbers from 1 to 9 and a target; a ValueError unless the base policy has read of 1 to 8 tries a game."""
    if not 1 <= tries <= 8:
        raise ValueError(f"tries must be from 1 to 8, got {tries}")
    return Task(problems, partial(work, tries), _no_steps)


def problems(split: str, seed: int = 0) -> Iterator[Row]:
    """Endless rows, whose answer is `target: number number number`; a ValueError for an unknown split."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}. Known: {', '.join(SPLITS)}")
    return _draw(split, Random(f"countdown game {split} {seed}"))


def _draw(split: str, rng: Random) -> Iterator[Row]:
    while True:
        numbers = [rng.randint(1, 9) for _ in range(3)]
        solution, target = _expression(numbers, rng)
        # By the numbers in any order, so that no game is in both splits.
        if not 10 <= target <= 99 or split_of(f"{target}: {sorted(numbers)}") != split:
            continue
        listed = " ".join(map(str, numbers))
        problem = f"Make ${target}$ from ${listed.replace(' ', ', ')}$."
        row = {"problem": problem, "solution": solution, "answer": f"{target}: {listed}"}
        yield {**row, "level": 1, "subject": "countdown game"}


def work(tries: int, row: Row, rng: Random) -> tuple[str, str]:
    """A game of random tries, and the last one as the answer."""
    numbers = [int(number) for number in row["answer"].partition(": ")[2].split()]
    written, expression = "", ""
    for _ in range(rng.randint(1, tries)):
        expression, _ = _expression(numbers, rng)
        solved, said = solves(expression, row["answer"])
        written += f"```attempt\n{expression}\n```output\n{said}\n```\n"
        if solved:
            break
    return written, expression


def _expression(numbers: Sequence[int], rng: Random) -> tuple[str, int]:
    """An expression of all three numbers, and its value."""
    a, b, c = rng.sample(numbers, 3)
    p, q = rng.choice("+-*"), rng.choice("+-*")
    first, second = _OPERATORS[p], _OPERATORS[q]
    value = first(a, second(b, c)) if q == "*" else second(first(a, b), c)
    return f"{a}{p}{b}{q}{c}", value


def _no_steps(problem: str, response: str) -> list[Step]:
    """A try need not follow from anything."""
    return []
