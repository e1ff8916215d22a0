"""Sums of numbers too long to add without writing: a policy that calls a tool can, and one that guesses cannot.

A working is a call in fences with the tool's answer (`trl_ext.turns.protocols.Fences`), or the sum written down at
once. The base policy has read both, so it calls some of the time. Where nothing answers its call, it makes up the
answer: a sum at once.
"""

import re
from collections.abc import Iterator
from functools import partial
from random import Random

from trl_ext.mini.problems import LEVELS, SPLITS, split_of
from trl_ext.mini.task import BasePolicyConfig, Row, Step, Task

TOOLS = ("calculator", "python")
_SUM = re.compile(r"\d{1,30}(?:\+\d{1,30})+")
_EQUATION = re.compile(r"(?<![\d+])(\d{1,30}(?:\+\d{1,30}){1,10})=(\d{1,40})\b")


def sums(*, digits: int = 6, terms: int = 2, calls: float = 0.3, tool: str = "calculator") -> Task:
    """Sums of up to `terms` numbers of up to `digits` digits.

    Args:
        calls: the share of workings with a call, in what the base policy has read.
        tool: that it has read of.

    Raises:
        ValueError: an option is out of its range.
    """
    if not len(LEVELS) <= digits <= 15:
        raise ValueError(f"digits must be from {len(LEVELS)}, one for each level, to 15, got {digits}")
    if not 2 <= terms <= 5:
        raise ValueError(f"terms must be from 2 to 5, got {terms}")
    if not 0 <= calls <= 1:
        raise ValueError(f"calls must be from 0 to 1, got {calls}")
    if tool not in TOOLS:
        raise ValueError(f"tool must be one of {', '.join(TOOLS)}, got {tool!r}")
    return Task(
        partial(problems, digits, terms),
        partial(work, calls, tool),
        check_steps,
        policy=BasePolicyConfig(steps=1000),
    )


def problems(digits: int, terms: int, split: str, seed: int = 0) -> Iterator[Row]:
    """Endless rows, uniform over the numbers' digits; a ValueError for an unknown split."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}. Known: {', '.join(SPLITS)}")
    return _draw(digits, terms, split, Random(f"sums {split} {seed}"))


def _draw(digits: int, terms: int, split: str, rng: Random) -> Iterator[Row]:
    while True:
        length = rng.randint(2, digits)
        numbers = [rng.randint(10 ** (length - 1), 10**length - 1) for _ in range(rng.randint(2, terms))]
        written = "+".join(map(str, numbers))
        problem = f"What is ${written}$?"
        if split_of(problem) == split:
            row = {"problem": problem, "solution": f"{written}={sum(numbers)}", "answer": str(sum(numbers))}
            yield {**row, "level": -(-(length - 1) * len(LEVELS) // (digits - 1)), "subject": "sums"}


def work(calls: float, tool: str, row: Row, rng: Random) -> tuple[str, str]:
    """A call and its answer, or the sum at once."""
    if rng.random() >= calls:
        return row["solution"], row["answer"]
    written = row["solution"].partition("=")[0]
    return f"```{tool}\n{written}\n```output\n{row['answer']}\n```\n", row["answer"]


def check_steps(problem: str, response: str) -> list[Step]:
    """The sums that a response writes down at once: valid if they are right, true if they are also the problem's."""
    found = _SUM.search(problem)
    steps = []
    for match in _EQUATION.finditer(response):
        is_valid = sum(map(int, match[1].split("+"))) == int(match[2])
        steps.append(
            Step(match.start(), match.end(), is_valid, is_valid and found is not None and match[1] == found[0])
        )
    return steps
