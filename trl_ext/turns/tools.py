"""Tools: what a model may call, and what it reads for an answer, whatever its call does."""

from __future__ import annotations

import inspect
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from transformers.utils import get_json_schema

from trl_ext.registry import import_function, unknown
from trl_ext.rewards.workers.pool import Failure, Pool, PoolError, WorkerLimits
from trl_ext.sandbox.limits import Limits, ProgramFailure, ProgramOutcome, SandboxError
from trl_ext.sandbox.pool import SandboxPool
from trl_ext.turns.calculator import calculator
from trl_ext.turns.environment import Environments, is_environment, methods_of

# What rewards call the truth, which nothing may hand to a tool: see `check_function`.
TRUTHS = ("answer", "ground_truth", "truth", "solution", "reference")
_MEMORY_MB = 512  # of a program or a worker
_OUTPUT_BYTES = 2**16
_MOST_CHARACTERS = 20_000  # of an answer, before its tokens are counted
_AT_ONCE = 2  # programs per core: what isolates one waits for the kernel as long as it computes

Kind = Literal["ok", "failed", "timeout"]


@dataclass(frozen=True)
class Call:
    """What a model asks a tool for.

    Attributes:
        arguments: by name; None if they cannot be read, and `fault` says why.
        earlier: the arguments of this response's earlier calls of the same tool.
        place: of the response, among those that are sampled together.
    """

    name: str
    arguments: Mapping[str, Any] | None
    fault: str = ""
    earlier: tuple[Mapping[str, Any], ...] = ()
    place: int = 0


@dataclass(frozen=True)
class Answer:
    """What a tool says to a call."""

    text: str
    kind: Kind = "ok"
    seconds: float = 0.0


class Tool(Protocol):
    """A function that a model may call."""

    function: Callable[..., Any]  # with types and a docstring, of which its description is made

    def answers(self, calls: Sequence[Call]) -> list[Answer]:
        """One answer per call, in their order; many calls run at once."""

    def close(self) -> None:
        """End its processes. Another call would start new ones."""


class Python:
    """Code in a sandbox, many calls at a time.

    Args:
        keeps_state: a call sees what the response's earlier ones have defined, which are executed again for it.
    """

    def __init__(self, seconds: float, keeps_state: bool = False) -> None:
        limits = Limits(seconds=seconds, memory_mb=_MEMORY_MB, output_bytes=_OUTPUT_BYTES, shown=_MOST_CHARACTERS)
        self.pool, self.keeps_state = SandboxPool(limits), keeps_state
        self.function = python

    def answers(self, calls: Sequence[Call]) -> list[Answer]:
        """What the code prints, and the value of an expression at its end."""
        with ThreadPoolExecutor(_AT_ONCE * cores()) as threads:
            return list(threads.map(self._answer, calls))

    def close(self) -> None:
        """End the process that sandboxes are forked from."""
        self.pool.close()

    def _answer(self, call: Call) -> Answer:
        began = time.monotonic()
        earlier = [str(arguments["code"]) for arguments in call.earlier if "code" in arguments]
        try:
            code = dict(call.arguments or {})["code"]
            outcome = self.pool.run_blocks([*(earlier if self.keeps_state else ()), str(code)])
        except KeyError:
            return Answer("Error: the argument 'code' is missing", "failed")
        except SandboxError as error:
            return Answer(f"Error: {' '.join(str(error).split())[:200]}", "failed", time.monotonic() - began)
        return Answer(_printed(outcome), _kind_of(outcome), time.monotonic() - began)


def python(code: str) -> str:
    """Execute Python code and return what it prints, and the value of an expression at its end.

    Args:
        code: the code; it has no network, no files and a few seconds.

    Returns:
        The output, or the error.
    """
    raise NotImplementedError(f"{code[:40]!r} runs in a sandbox, see `Python`")


def _kind_of(outcome: ProgramOutcome) -> Kind:
    if not isinstance(outcome, ProgramFailure):
        return "ok"
    return "timeout" if outcome.kind == "timeout" else "failed"


def _printed(outcome: ProgramOutcome) -> str:
    """Output and error as a model reads them."""
    parts = [outcome.output.strip("\n")]
    if isinstance(outcome, ProgramFailure):
        said = outcome.detail.rstrip(".")
        parts.append(said if outcome.kind == "error" else f"Error: {said}")
    return "\n".join(part for part in parts if part) or "(no output)"


class Calculator:
    """Arithmetic, in this process: parsed, and bounded in every operation."""

    function = staticmethod(calculator)

    def answers(self, calls: Sequence[Call]) -> list[Answer]:
        """The values."""
        return [self._answer(call) for call in calls]

    def close(self) -> None:
        """There is nothing to end."""

    def _answer(self, call: Call) -> Answer:
        began = time.monotonic()
        try:
            text, kind = calculator(**{name: str(value) for name, value in (call.arguments or {}).items()}), "ok"
        except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
            return Answer(f"Error: {error}", "failed", time.monotonic() - began)
        return Answer(text, kind, time.monotonic() - began)  # type: ignore[arg-type]


class OwnFunction:
    """A user's function, in processes that can be killed; it needs no sandbox, since a user wrote it.

    Args:
        path: file.py:function.
    """

    def __init__(self, path: str, seconds: float) -> None:
        self.function = import_function(path, "tool")
        self.seconds = seconds
        limits = WorkerLimits(seconds=seconds, memory_mb=2 * _MEMORY_MB, workers=cores())
        self.pool = Pool(path, limits, all_may_fail=True)

    def answers(self, calls: Sequence[Call]) -> list[Answer]:
        """What the function returns, as a text."""
        given = [self._bound(call) for call in calls]
        jobs = [arguments for arguments in given if not isinstance(arguments, Answer)]
        began = time.monotonic()
        try:
            outcomes = self.pool.map(jobs)
        except PoolError as error:
            outcomes = [Failure("error", f"the tool does not run: {str(error)[:200]}")] * len(jobs)
        each = (time.monotonic() - began) / max(len(jobs), 1)
        told = iter(self._said(outcome, each) for outcome in outcomes)
        return [arguments if isinstance(arguments, Answer) else next(told) for arguments in given]

    def close(self) -> None:
        """Kill the workers."""
        self.pool.close()

    def _bound(self, call: Call) -> list[Any] | Answer:
        try:
            bound = inspect.signature(self.function).bind(**(call.arguments or {}))
        except TypeError as error:
            return Answer(f"Error: {error}", "failed")
        return list(bound.args)

    def _said(self, outcome: Any, seconds: float) -> Answer:
        if not isinstance(outcome, Failure):
            return Answer(str(outcome)[:_MOST_CHARACTERS], "ok", seconds)
        kind: Kind = "timeout" if outcome.kind == "timeout" else "failed"
        return Answer(f"Error: {outcome.detail}", kind, seconds)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
        return Environments(named(name), seconds, _MOST_CHARACTERS)
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
