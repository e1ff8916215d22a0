"""A reward function with its answers checked, so that a fault in it is named where it happens."""

from __future__ import annotations

import contextlib
import functools
import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any


class RewardError(RuntimeError):
    """A reward function raised, hung, or did not return one number (or None) per completion."""


def checked(function: Callable[..., Any], seconds: float | None) -> Callable[..., Any]:
    """`function` with its faults named.

    Args:
        seconds: it may take; None for no limit. Only Python code in a main thread can be interrupted.

    Raises:
        RewardError: from the call, as the class says.
    """
    if inspect.iscoroutinefunction(function):
        return function
    name = getattr(function, "__name__", type(function).__name__)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        completions = kwargs.get("completions", args[1] if len(args) > 1 else ())
        late = f"reward {name!r} took longer than {seconds} s for {len(completions)} completions (--reward_timeout)"
        try:
            with _limit(seconds, RewardError(late)):
                rewards = function(*args, **kwargs)
        except RewardError:
            raise
        except Exception as error:
            raise RewardError(f"reward {name!r} raised {type(error).__name__}: {error}") from error
        _check(name, rewards, len(completions))
        return rewards

    return call


def _check(name: str, rewards: Any, expected: int) -> None:
    try:
        given = list(rewards)
    except TypeError:
        raise RewardError(f"reward {name!r} returned {rewards!r}, not a list of {expected} rewards") from None
    if len(given) != expected:
        raise RewardError(f"reward {name!r} returned {len(given)} rewards for {expected} completions")
    for place, reward in enumerate(given):
        if reward is not None and not isinstance(reward, Real) and not hasattr(reward, "__float__"):
            raise RewardError(f"reward {name!r} returned {reward!r} for completion {place}, not a number or None")


@contextlib.contextmanager
def _limit(seconds: float | None, error: Exception) -> Iterator[None]:
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(number: int, frame: Any) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
