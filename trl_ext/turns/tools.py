"""Tools by name: which there are, which a user may name, and who answers a call."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.utils import get_json_schema

from trl_ext.registry import import_function, unknown
from trl_ext.sandbox.limits import SandboxError
from trl_ext.turns.calculator import Calculator, calculator
from trl_ext.turns.calls import Answer, Call, Tool
from trl_ext.turns.environment import Environments, is_environment, methods_of
from trl_ext.turns.own_function import OwnFunction
from trl_ext.turns.python_tool import Python, python

# What rewards call the truth, which nothing may hand to a tool: see `check_function`.
TRUTHS = ("answer", "ground_truth", "truth", "solution", "reference")
NAMES = ("python", "calculator")


@dataclass
class Toolbox:
    """The tools of a run, by name."""

    tools: dict[str, Tool] = field(default_factory=dict)
    environments: list[Environments] = field(default_factory=list)

    @classmethod
    def of(cls, names: str, seconds: float, keeps_state: bool = False) -> Toolbox:
        """The tools of names or paths, separated by commas.

        Raises:
            ValueError: one is unknown, twice, or cannot be described to a model, or programs cannot be isolated here.
        """
        box = cls()
        for name in map(str.strip, names.split(",")):
            made = _made(name, seconds, keeps_state)
            if isinstance(made, Environments):
                if box.environments:
                    raise ValueError(f"tools: {name} is a second environment, and a response has one")
                box.environments.append(made)
            tools = list(map(made.tool, methods_of(made.kind))) if isinstance(made, Environments) else [made]
            for tool in tools:
                own = tool.function.__name__
                if own in box.tools:
                    raise ValueError(f"tools: two are called {own!r}: rename one, or leave it out")
                box.tools[own] = tool
        return box

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Reset the environments for responses to these problems."""
        for environments in self.environments:
            environments.begin(rows)

    def turn_rewards(self, place: int) -> float:
        """The sum of what a response's turns have been given so far."""
        return sum(environments.turn_rewards(place) for environments in self.environments)

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """The functions, as TRL and chat templates want them."""
        return [tool.function for tool in self.tools.values()]

    def answers(self, calls: Sequence[Call]) -> list[Answer]:
        """One answer per call, in their order, in which an environment's methods are called, too."""
        answers: dict[int, Answer] = {}
        together = defaultdict[object, list[int]](list)
        for number, call in enumerate(calls):
            together[getattr(self.tools.get(call.name), "environments", call.name)].append(number)
        for numbers in together.values():
            asked = [calls[number] for number in numbers]
            answers |= zip(numbers, self._by(asked[0].name, asked), strict=True)
        return [answers[number] for number in range(len(calls))]

    def _by(self, name: str, calls: Sequence[Call]) -> list[Answer]:
        if name not in self.tools:
            return [Answer(f"Error: no tool {name!r}; there are {', '.join(self.tools)}", "failed")] * len(calls)
        read = [call for call in calls if call.arguments is not None]
        told = iter(self.tools[name].answers(read) if read else ())
        return [
            next(told) if call.arguments is not None else Answer(f"Error: {call.fault}", "failed") for call in calls
        ]

    def close(self) -> None:
        """End all processes."""
        for tool in self.tools.values():
            tool.close()


def _made(name: str, seconds: float, keeps_state: bool) -> Tool | Environments:
    if name == "calculator":
        return Calculator()
    if name == "python":
        try:
            return Python(seconds, keeps_state)
        except SandboxError as error:
            said = " ".join(str(error).split())[:400]
            raise ValueError(f"tools: python: {said}. Leave it out, or start where namespaces are allowed") from error
    if ":" not in name:
        raise ValueError(f"tools: {unknown('tool', name, NAMES)}, or file.py:function")
    for function in functions_of(name):
        check_function(function, name if function is named(name) else f"{name}.{function.__name__}")
    if is_environment(named(name)):
        return Environments(named(name), seconds)
    return OwnFunction(name, seconds)


def environment_of(names: str) -> type | None:
    """The class among the tools that is an environment, if one is."""
    own = [named(name) for name in map(str.strip, names.split(",")) if ":" in name]
    return next(filter(is_environment, own), None)


def named(path: str) -> Any:
    """The function or the class file.py:NAME.

    Raises:
        ValueError: it is not there, or a class that is no environment, or one without a method to call.
    """
    own = import_function(path, "tool")
    if inspect.isclass(own) and not is_environment(own):
        raise ValueError(
            f"tools: {path} is a class without reset: give it one, which gets a problem's row, or a function"
        )
    if is_environment(own) and not methods_of(own):
        raise ValueError(f"tools: {path} has no public method next to reset and get_reward, which would be the tools")
    return own


def functions_of(names: str) -> list[Callable[..., Any]]:
    """The functions of tools, and methods of environments, none of which is started."""
    own: dict[str, Callable[..., Any]] = {"python": python, "calculator": calculator}
    functions = []
    for name in map(str.strip, names.split(",")):
        one = own.get(name) or named(name)
        functions += [getattr(one(), method) for method in methods_of(one)] if is_environment(one) else [one]
    return functions


def check_function(function: Callable[..., Any], path: str) -> None:
    """Refuse, by a `ValueError`, a function that cannot be described to a model, or must not be called by one."""
    try:
        described = get_json_schema(function)["function"]
    except Exception as error:  # of several libraries' own kinds
        said = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"tools: {path}: {said}: a tool needs a type for every argument, and a docstring with an Args section that "
            "describes each"
        ) from error
    if not str(described.get("description") or "").strip():
        raise ValueError(f"tools: {path} has no description: a docstring's first line says what a tool does")
    for name, parameter in inspect.signature(function).parameters.items():
        if name in TRUTHS:
            raise ValueError(
                f"tools: {path} has the argument {name!r}, which is what rewards call the truth: a model fills in a "
                "tool's arguments, and must not be told of it; rename it"
            )
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise ValueError(f"tools: {path}: the argument {name!r} must be a plain one, without * before it")
