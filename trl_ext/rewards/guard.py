"""A reward function with its answers checked, so that a fault in it is named where it happens."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import math
import signal
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any


class RewardError(RuntimeError):
    """A reward function raised, hung, or did not return one number (or None) per completion.

    One that stands for an exception of the function's own is of that exception's type, too.
    """


def checked(function: Callable[..., Any], seconds: float | None) -> Callable[..., Any]:
    """`function`, async where it is, with its faults named; its attribute `checked` is the `Checked` behind it.

    Args:
        seconds: it may take; None for no limit. What is not async can be interrupted in a main thread only, and where
            it runs Python code or waits.
    """
    target, reward = _unwrapped(function), Checked(function, seconds)
    if inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(target.__call__):  # as TRL finds out

        @functools.wraps(function)
        async def call(*args: Any, **kwargs: Any) -> list[Any]:
            return await reward.awaited(*args, **kwargs)

    else:

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> list[Any]:
            return reward.called(*args, **kwargs)

    call.checked = reward  # type: ignore[attr-defined]
    return call


class Checked:
    """A reward function whose calls raise `RewardError`.

    Attributes:
        columns: what the last call logged by `log_extra`.
        is_all_nan: whether the last call returned NaN for every completion.
    """

    def __init__(self, function: Callable[..., Any], seconds: float | None) -> None:
        self.function, self.seconds, self._code = function, seconds, _code_of(function)
        self.name = getattr(_unwrapped(function), "__name__", type(function).__name__)
        self.columns: dict[str, list[Any]] = {}
        self.is_all_nan = False

    def called(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The function's rewards."""
        self._begin(kwargs)
        try:
            with _limit(self.seconds, functools.partial(self._late, kwargs)):
                rewards = self._listed(self.function(*args, **kwargs), kwargs)
        except Exception as error:
            raise self._fault_from(error) from error.__cause__ if isinstance(error, RewardError) else error
        return self._end(rewards, kwargs)

    async def awaited(self, *args: Any, **kwargs: Any) -> list[Any]:
        """An async function's rewards."""
        self._begin(kwargs)
        try:
            task = asyncio.ensure_future(self.function(*args, **kwargs))
            if not (await asyncio.wait({task}, timeout=self.seconds))[0]:
                task.cancel()
                raise self._late(kwargs)
            rewards = self._listed(task.result(), kwargs)
        except Exception as error:
            raise self._fault_from(error) from error.__cause__ if isinstance(error, RewardError) else error
        return self._end(rewards, kwargs)

    def _begin(self, kwargs: dict[str, Any]) -> None:
        self.columns, self.is_all_nan = {}, False
        log_extra = kwargs.get("log_extra")
        if log_extra is None:
            return

        def log(column: str, values: Any) -> None:
            listed = [value.tolist() if hasattr(value, "tolist") else value for value in values]  # of torch or numpy
            self.columns.setdefault(column, []).extend(listed)
            log_extra(column, listed)

        kwargs["log_extra"] = log

    def _listed(self, rewards: Any, kwargs: Mapping[str, Any]) -> list[Any]:
        """Of a generator only once; what it raises counts as the function's."""
        if not isinstance(rewards, Iterable):
            number = len(kwargs["completions"]) if "completions" in kwargs else "as many"
            raise self.fault(f"returned {rewards!r}, not a list of {number} rewards")
        return list(rewards)

    def _end(self, rewards: list[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        for place, reward in enumerate(rewards):
            if reward is not None and not _is_number(reward):
                raise self.fault(f"returned {reward!r} for completion {place}, not a number or None")
        if "completions" not in kwargs:  # called by hand, as TRL's wrapper of an environment's reward may be
            return rewards
        expected = len(kwargs["completions"])
        if len(rewards) != expected:
            raise self.fault(f"returned {len(rewards)} rewards for {expected} completions")
        for column, values in self.columns.items():
            if len(values) != expected:
                raise self.fault(f"logged {len(values)} values in column {column!r} for {expected} completions")
        self.is_all_nan = bool(rewards) and all(reward is not None and math.isnan(reward) for reward in rewards)
        return rewards

    def fault(self, what: str, place: str | None = None) -> RewardError:
        """An error that says what this reward function did, and at which line; by default where it is written."""
        if place is None and self._code is not None:
            place = f"{self._code.co_filename}:{self._code.co_firstlineno}"
        return RewardError(f"reward {self.name!r} {what}" + (f" ({place})" if place else ""))

    def _late(self, kwargs: Mapping[str, Any], frame: FrameType | None = None) -> RewardError:
        count = len(kwargs.get("completions", ()))
        while frame is not None and self._code is not None and frame.f_code.co_filename != self._code.co_filename:
            frame = frame.f_back
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else None
        return self.fault(f"took longer than {self.seconds} s for {count} completions (--reward_timeout)", place)

    def _fault_from(self, error: Exception) -> RewardError:
        if isinstance(error, RewardError):
            return error
        lines = [
            f"{frame.f_code.co_filename}:{line}"
            for frame, line in traceback.walk_tb(error.__traceback__)
            if self._code is None or frame.f_code.co_filename == self._code.co_filename
        ]
        fault = self.fault(f"raised {type(error).__name__}: {error}", lines[-1] if lines else None)
        return _of_both_types(fault, error)


def merged_columns(logged: Iterable[tuple[str, Mapping[str, list[Any]]]], taken: Collection[str]) -> dict[str, Any]:
    """Columns of all reward functions, given with their names; one whose name is taken is called `function/column`."""
    merged: dict[str, Any] = {}
    for function, columns in logged:
        for column, values in columns.items():
            numbered = (f"{function}/{column}-{number}" for number in itertools.count(2))
            names = itertools.chain((column, f"{function}/{column}"), numbered)
            merged[next(name for name in names if name not in merged and name not in taken)] = values
    return merged


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):  # such as a tensor of several
        return False
    return not isinstance(value, (str, bytes))


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _code_of(function: Callable[..., Any]) -> CodeType | None:
    """Where the function is written; of a callable object its `__call__`. None for one in C."""
    target = inspect.unwrap(_unwrapped(function))
    code = getattr(target, "__code__", None) or getattr(getattr(target, "__call__", None), "__code__", None)  # noqa: B004
    return code if isinstance(code, CodeType) else None


def _of_both_types(fault: RewardError, error: Exception) -> RewardError:
    """`fault` as an exception that is caught as `error` would be, with its arguments and attributes."""
    if isinstance(error, (StopIteration, StopAsyncIteration)):  # Python takes these for something else
        return fault
    own = {"__str__": lambda _: str(fault), "__init__": lambda *_: None, "__module__": __name__}
    try:
        both: Any = type("RewardError", (RewardError, type(error)), own)(*error.args)
        both.__dict__.update(vars(error))
    except Exception:  # a type that cannot be inherited from or made
        return fault
    found: RewardError = both
    return found


@contextlib.contextmanager
def _limit(seconds: float | None, error: Callable[[FrameType | None], Exception]) -> Iterator[None]:
    """Raise `error` in the main thread after so many seconds.

    By a thread and SIGURG, which does nothing by default: the alarm and its timer are the process's own.
    """
    main = threading.main_thread()
    if seconds is None or threading.current_thread() is not main or main.ident is None:
        yield
        return

    def expire(number: int, frame: FrameType | None) -> None:
        raise error(frame)

    before = signal.signal(signal.SIGURG, expire)
    timer = threading.Timer(seconds, signal.pthread_kill, (main.ident, signal.SIGURG))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        try:
            timer.cancel()
        finally:
            signal.signal(signal.SIGURG, before)
