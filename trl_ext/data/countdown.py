"""Countdown: reach a target with the numbers given, each used at most once, by + - * and /.

The game of TinyZero (github.com/Jiayi-Pan/TinyZero), endless and in two splits like mini-MATH. Of one problem there are
many solutions, so the answer is checked and not compared: `trl_ext.rewards.countdown`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, Any

from trl_ext.mini.problems import SPLITS
from trl_ext.mini.problems import split_of as split_of_text

if TYPE_CHECKING:
    from datasets import Dataset

VALIDATION_SHARE = 0.1
TEXT = (
    "Using the numbers {numbers}, make an expression that equals {target}. You may use +, -, *, / and brackets, and "
    "each number at most once."
)


def problems(split: str, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Endless rows `problem`, `answer` (`target: number number ...`) and `level`, the count of the numbers.

    Raises:
        ValueError: unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}. Known: {', '.join(SPLITS)}")
    rng = Random(f"countdown {split} {seed}")
    while True:
        numbers = [rng.randint(1, 99) for _ in range(rng.choice((3, 4)))]
        target = _reachable(numbers, rng)
        if target is None or not 1 <= target <= 999 or target in numbers:
            continue
        if split_of(target, numbers) == split:
            yield described(target, numbers)


def described(target: int, numbers: Sequence[int]) -> dict[str, Any]:
    """The row of a problem."""
    listed = " ".join(map(str, numbers))
    text = TEXT.format(numbers=listed.replace(" ", ", "), target=target)
    return {"problem": text, "answer": f"{target}: {listed}", "level": len(numbers), "subject": "countdown"}


def countdown(split: str, n: int, seed: int = 0) -> Dataset:
    """The first `n` rows as a `datasets.Dataset`."""
    from datasets import Dataset

    return Dataset.from_list(list(islice(problems(split, seed), n)))


def _reachable(numbers: list[int], rng: Random) -> int | None:
    """A whole number made from at least two of the numbers, or None where the draw gave none."""
    pool = [Fraction(number) for number in rng.sample(numbers, rng.randint(2, len(numbers)))]
    while len(pool) > 1:
        a, b = (pool.pop(rng.randrange(len(pool))) for _ in range(2))
        operator = rng.choice("+-*/")
        if operator == "/" and b == 0:
            return None
        pool.append(a + b if operator == "+" else a - b if operator == "-" else a * b if operator == "*" else a / b)
    return int(pool[0]) if pool[0].denominator == 1 else None


def split_of(target: int, numbers: Sequence[int]) -> str:
    """By the target and the numbers in any order, so that no problem is in both splits, whatever the seeds."""
    return split_of_text(f"{target}: {sorted(numbers)}", VALIDATION_SHARE)
