"""Environments: tools with a state of their own for each response, such as a game, as TRL's `environment_factory` has.

A class with a method `reset`, which gets the row of a problem; each other public method is a tool. Where it defines
`get_reward`, that is a reward of the whole response. Where its instances have a list `turn_rewards`, to which a call
may append, what is appended is a reward of the turn that called.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from trl_ext.rewards.guard import RewardError, limited
from trl_ext.turns.calls import MOST_CHARACTERS, Answer, Call

_NO_TOOLS = ("reset", "get_reward")


def is_environment(named: object) -> TypeGuard[type]:
    """Whether it is a class whose instances are environments."""
    return inspect.isclass(named) and callable(getattr(named, "reset", None))


def methods_of(environment: type) -> list[str]:
    """The names of the methods that are tools."""
    members = inspect.getmembers(environment, inspect.isfunction)
    return [name for name, _ in members if not name.startswith("_") and name not in _NO_TOOLS]


class Environments:
    """An environment per response, in this process.

    Args:
        seconds: that a call of a method may take.
    """

    def __init__(self, kind: type, seconds: float) -> None:
        self.kind, self.seconds = kind, seconds
        self.each: list[Any] = []

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Reset as many as there are rows, each with its own.

        Raises:
            RuntimeError: `reset` raised, or returned a text.
            ValueError: nobody says which problems there are.
        """
        if not rows:
            raise ValueError(f"tools: {self.kind.__name__} is reset with the rows of the problems, and there are none")
        self.each += [self.kind() for _ in range(len(rows) - len(self.each))]
        for environment, row in zip(self.each, rows, strict=False):
            try:
                said = environment.reset(**row)
            except Exception as error:
                raise RuntimeError(
                    f"tools: {self.kind.__name__}.reset raised {type(error).__name__}: {error}"
                ) from error
            if said:
                raise RuntimeError(
                    f"tools: {self.kind.__name__}.reset returned {str(said)[:60]!r}: prompts are made before responses "
                    "begin, so what it says belongs in the dataset's column of the problem"
                )

    def tool(self, name: str) -> Method:
        """One of its methods."""
        return Method(self, name)

    def turn_rewards(self, place: int) -> float:
        """The sum of what a response's turns have been given so far."""
        return float(sum(getattr(self.each[place], "turn_rewards", ())))

    def rewards(self, n: int) -> list[float]:
        """Of the first n responses, by `get_reward`."""
        return [environment.get_reward() for environment in self.each[:n]]


class Method:
    """A method of every response's own environment."""

    def __init__(self, environments: Environments, name: str) -> None:
        self.environments = environments
        self.function: Callable[..., Any] = getattr(environments.kind(), name)

    def answers(self, calls: Sequence[Call]) -> list[Answer]:
        """What the methods that are called return, call by call."""
        return [self._answer(call) for call in calls]

    def close(self) -> None:
        """There is nothing to end."""

    def _answer(self, call: Call) -> Answer:
        began, late = time.monotonic(), RewardError(f"took longer than {self.environments.seconds} s")
        method = getattr(self.environments.each[call.place], call.name)
        try:
            with limited(self.environments.seconds, lambda _: late):
                text = str(method(**(call.arguments or {})))[:MOST_CHARACTERS]
        except Exception as error:
            kind = "timeout" if error is late else "failed"
            return Answer(f"Error: {error}", kind, time.monotonic() - began)  # type: ignore[arg-type]
        return Answer(text, "ok", time.monotonic() - began)
