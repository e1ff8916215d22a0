"""A reward function whose results are checked, so that an error in it is reported where it happens."""

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, SupportsFloat, SupportsIndex

from trl_ext.rewards.score import Score

RewardFunction = Callable[..., Any]  # in TRL's signature; an async one returns an awaitable


class RewardError(RuntimeError):
    """A reward function raised, hung, or did not return one number (or None) per completion.

    If the function raised an exception, the error is of that exception's type as well.
    """


def guarded(reward_fn: RewardFunction, timeout: float | None) -> RewardFunction:
    """`reward_fn`, async if it is async, with its errors reported; the attribute `guard` is the `Guard` behind it.

    Args:
        timeout: seconds that a call may take; None for no limit. A function that is not async can be interrupted only
            in the main thread, and only while it runs Python code or waits.
    """
    target, guard = _unwrapped(reward_fn), Guard(reward_fn, timeout)
    if inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(target.__call__):  # as TRL decides it

        @functools.wraps(reward_fn)
        async def call(*args: object, **kwargs: object) -> list[Any]:
            return await guard.call_async(*args, **kwargs)

    else:

        @functools.wraps(reward_fn)
        def call(*args: object, **kwargs: object) -> list[Any]:
            return guard.call(*args, **kwargs)

    call.guard = guard  # type: ignore[attr-defined]
    return call


class Guard:
    """Calls a reward function and raises `RewardError` for whatever is wrong with it.

    Attributes:
        columns: what the last call logged by `log_extra`.
        correct: what the last call's `Score`s say, None for a plain number; None altogether if it returned no `Score`.
        is_all_nan: whether the last call returned NaN for every completion.
    """

    def __init__(self, reward_fn: RewardFunction, timeout: float | None) -> None:
        self.reward_fn, self.timeout, self._code = reward_fn, timeout, _code_of(reward_fn)
        self.name = getattr(_unwrapped(reward_fn), "__name__", type(reward_fn).__name__)
        self.columns: dict[str, list[Any]] = {}
        self.correct: list[bool | None] | None = None
        self.is_all_nan = False

    def call(self, *args: object, **kwargs: Any) -> list[Any]:
        """The function's rewards."""
        self._begin(kwargs)
        try:
            with limited(self.timeout, functools.partial(self._late, kwargs)):
                rewards = self._as_list(self.reward_fn(*args, **kwargs), kwargs)
        except RewardError:
            raise
        except Exception as error:
            raise self._fault_from(error) from error
        return self._end(rewards, kwargs)

    async def call_async(self, *args: object, **kwargs: Any) -> list[Any]:
        """The async function's rewards."""
        self._begin(kwargs)
        try:
            task = asyncio.ensure_future(self.reward_fn(*args, **kwargs))
            if not (await asyncio.wait({task}, timeout=self.timeout))[0]:
                task.cancel()
                raise self._late(kwargs, None)
            rewards = self._as_list(task.result(), kwargs)
        except RewardError:
            raise
        except Exception as error:
            raise self._fault_from(error) from error
        return self._end(rewards, kwargs)

    def _begin(self, kwargs: dict[str, Any]) -> None:
        self.columns, self.correct, self.is_all_nan = {}, None, False
        if (log_extra := kwargs.get("log_extra")) is None:
            return

        def log(column: str, values: Iterable[Any]) -> None:
            listed = [value.tolist() if hasattr(value, "tolist") else value for value in values]  # of torch or numpy
            self.columns.setdefault(column, []).extend(listed)
            log_extra(column, listed)

        kwargs["log_extra"] = log

    def _as_list(self, rewards: object, kwargs: Mapping[str, Sequence[Any]]) -> list[Any]:
        """The rewards of a generator can be read only once, and an exception in it counts as the function's."""
        if not isinstance(rewards, Iterable):
            number = len(kwargs["completions"]) if "completions" in kwargs else "as many"
            raise self.fault(f"returned {rewards!r}, not a list of {number} rewards")
        return list(rewards)

    def _end(self, rewards: list[Any], kwargs: Mapping[str, Sequence[Any]]) -> list[Any]:
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
        if any(isinstance(reward, Score) for reward in rewards):
            self.correct = [reward.correct if isinstance(reward, Score) else None for reward in rewards]
        self.is_all_nan = bool(rewards) and all(reward is not None and math.isnan(reward) for reward in rewards)
        return rewards

    def fault(self, what: str, place: str | None = None) -> RewardError:
        """An error that says what the reward function did and at which line; by default, where it is defined."""
        if place is None and self._code is not None:
            place = f"{self._code.co_filename}:{self._code.co_firstlineno}"
        return RewardError(f"reward {self.name!r} {what}" + (f" ({place})" if place else ""))

    def _late(self, kwargs: Mapping[str, Sequence[Any]], frame: FrameType | None) -> RewardError:
        count = len(kwargs.get("completions", ()))
        while frame is not None and self._code is not None and frame.f_code.co_filename != self._code.co_filename:
            frame = frame.f_back
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else None
        return self.fault(f"took longer than {self.timeout} s for {count} completions (--reward_timeout)", place)

    def _fault_from(self, error: Exception) -> RewardError:
        lines = [
            f"{frame.f_code.co_filename}:{line}"
            for frame, line in traceback.walk_tb(error.__traceback__)
            if self._code is None or frame.f_code.co_filename == self._code.co_filename
        ]
        fault = self.fault(f"raised {type(error).__name__}: {error}", lines[-1] if lines else None)
        return _error_of_both_types(fault, error)


def merged_columns(logged: Iterable[tuple[str, Mapping[str, list[Any]]]], taken: Collection[str]) -> dict[str, Any]:
    """Columns of all reward functions, given with their names; one whose name is taken is called `function/column`."""
    merged: dict[str, Any] = {}
    for function, columns in logged:
        for column, values in columns.items():
            numbered = (f"{function}/{column}-{number}" for number in itertools.count(2))
            names = itertools.chain((column, f"{function}/{column}"), numbered)
            merged[next(name for name in names if name not in merged and name not in taken)] = values
    return merged


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, (SupportsFloat, SupportsIndex)) and float(value) is not None
    except (TypeError, ValueError, RuntimeError):  # such as a tensor with several elements
        return False


def _unwrapped(function: RewardFunction) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _code_of(function: RewardFunction) -> CodeType | None:
    """The code of the function, or of a callable object's `__call__`; None for one written in C."""
    target = inspect.unwrap(_unwrapped(function))
    code = getattr(target, "__code__", None) or getattr(getattr(target, "__call__", None), "__code__", None)  # noqa: B004
    return code if isinstance(code, CodeType) else None


def _error_of_both_types(fault: RewardError, error: Exception) -> RewardError:
    """`fault` as an exception that is caught as `error` would be, with its arguments and attributes."""
    if isinstance(error, (StopIteration, StopAsyncIteration)):  # in a generator Python gives these another meaning
        return fault
    own = {"__str__": lambda _: str(fault), "__init__": lambda *_: None, "__module__": __name__}
    try:
        both: RewardError = type("RewardError", (RewardError, type(error)), own)(*error.args)
        both.__dict__.update(vars(error))
    except Exception:  # a type that cannot be subclassed or constructed
        return fault
    return both


@contextlib.contextmanager
def limited(seconds: float | None, error: Callable[[FrameType | None], Exception]) -> Iterator[None]:
    """Raise `error` in the main thread after `seconds`; Python code and waiting can be interrupted so.

    A thread sends SIGURG, which does nothing by default; SIGALRM and its timer are left to the process.
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
