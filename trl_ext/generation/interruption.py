"""Ending what is being sampled when the process is told to stop, without waiting for the rest.

A rollout of a large model takes minutes on a CPU, and the pass over its prompts alone many seconds, so that a flag to
be looked at after each token is not enough: the signal's handler itself raises, while an engine samples and at no other
time. An engine's call changes nothing that a checkpoint has but the states of generators. Nothing is passed between
who listens and the engines, because TRL's and vLLM's calls lie in between.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from contextvars import ContextVar


class SamplingStopped(BaseException):
    """Sampling has ended early, because the process was told to stop.

    No `Exception`, as `KeyboardInterrupt` is none: who catches all of those on the way would take it for a fault.
    """


class StopRequest:
    """Whether the process was told to stop."""

    def __init__(self) -> None:
        self.received = False
        self._is_sampling = False

    def receive(self) -> None:
        """Note that it was; what a signal's handler calls.

        Raises:
            SamplingStopped: an engine is sampling that may be stopped.
        """
        self.received = True
        if self._is_sampling:
            self._is_sampling = False  # once: what is on the way out is not to be interrupted again
            raise SamplingStopped

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGTERM while the block runs; Python allows that in the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, lambda number, frame: self.receive())
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    @contextlib.contextmanager
    def ending_sampling(self) -> Iterator[None]:
        """In the block `sampling` raises `SamplingStopped` once the request has come."""
        before = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(before)

    @contextlib.contextmanager
    def _sampling(self) -> Iterator[None]:
        self._is_sampling = True
        try:
            stop_if_told()  # it may have come before
            yield
        finally:
            self._is_sampling = False


_CURRENT: ContextVar[StopRequest | None] = ContextVar("stop request", default=None)


def sampling() -> contextlib.AbstractContextManager[None]:
    """Around an engine's call, which changes nothing that outlives it: a request to stop ends it at once."""
    current = _CURRENT.get()
    return contextlib.nullcontext() if current is None else current._sampling()


@contextlib.contextmanager
def to_the_end() -> Iterator[None]:
    """In the block nothing that is sampled ends early."""
    before = _CURRENT.set(None)
    try:
        yield
    finally:
        _CURRENT.reset(before)


def stop_if_told() -> None:
    """Called after each token: a handler's exception is lost where it comes in a `__del__`."""
    current = _CURRENT.get()
    if current is not None and current.received:
        raise SamplingStopped
