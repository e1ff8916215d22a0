"""Tools as a user writes them into a file, good ones and bad ones."""

from __future__ import annotations

import os
import time


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def moody(what: str) -> str:
    """Do as it is told.

    Args:
        what: what to do.
    """
    if what == "hang":
        time.sleep(600)
    if what == "die":
        os._exit(3)
    if what == "raise":
        raise ValueError("not today")
    if what == "flood":
        for _ in range(10**5):
            print("x" * 10**4)
    if what == "fill":
        return "x" * 10**7
    return f"{what} is done"


def untyped(a, b: int) -> int:  # type: ignore[no-untyped-def]
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return int(a + b)


def undocumented(a: int) -> int:
    return a


def half_documented(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
    """
    return a + b


def check(answer: str) -> bool:
    """Check an answer.

    Args:
        answer: the answer.
    """
    return bool(answer)


def several(*numbers: int) -> int:
    """Add numbers.

    Args:
        numbers: some.
    """
    return sum(numbers)


def calculator(expression: str) -> str:
    """Another calculator.

    Args:
        expression: something.
    """
    return expression


def says(response: str, ground_truth: str) -> dict[str, float]:
    """A grader of the course's kind, next to the tools so that a worker loads it in no time."""
    right = float(response.endswith(ground_truth))
    return {"format_reward": 1.0, "answer_reward": right, "reward": right}
