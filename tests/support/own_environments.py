"""Environments as a user writes them into a file, good ones and bad ones."""

from __future__ import annotations

import time
from typing import Any


class Counter:
    """Counts what it is told, from the number in the row on."""

    def reset(self, start: int = 0, **row: Any) -> None:
        self.total = start
        self.turn_rewards: list[float] = []

    def add(self, number: int) -> str:
        """Add a number to the total.

        Args:
            number: the number.
        """
        if number == 13:
            raise ValueError("not that one")
        while number == 99:
            time.sleep(0.01)
        self.total += number
        self.turn_rewards.append(float(number))
        return str(self.total)

    def double(self, times: int) -> str:
        """Double the total.

        Args:
            times: how often.
        """
        self.total *= 2**times
        return str(self.total)

    def get_reward(self) -> float:
        return float(self.total)

    def _hidden(self) -> None: ...


class Talkative(Counter):
    def reset(self, start: int = 0, **row: Any) -> None:  # type: ignore[override]
        super().reset(start)
        return "Begin!"  # type: ignore[return-value]


class Broken(Counter):
    def reset(self, start: int = 0, **row: Any) -> None:
        raise KeyError("numbers")


class Untyped:
    def reset(self, **row: Any) -> None: ...

    def add(self, number):  # type: ignore[no-untyped-def]
        """Add a number.

        Args:
            number: the number.
        """


class Telling:
    def reset(self, **row: Any) -> None: ...

    def check(self, answer: str) -> str:
        """Check an answer.

        Args:
            answer: the answer.
        """
        return answer


class Idle:
    def reset(self, **row: Any) -> None: ...


class NoReset:
    def add(self, number: int) -> int:
        return number


class Calculators(Counter):
    """Its tool is `calculator`, as one of ours."""

    def calculator(self, expression: str) -> str:
        """Another calculator.

        Args:
            expression: something.
        """
        self.turn_rewards.append(1.0)
        self.total += 1
        return expression and "6"
