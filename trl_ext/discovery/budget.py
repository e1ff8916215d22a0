"""What a run may spend: calls, tokens and time, taken before they are spent so that no limit is passed."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field


class BudgetSpent(Exception):
    """The budget does not cover another call; the message says which part of it is spent."""


@dataclass
class Budget:
    """Limits of a run, and what it has used of them. Several threads take from it.

    Attributes:
        calls: requests to the endpoint, repeated ones included.
        tokens: of prompts and answers together.
        seconds: of wall-clock, those of earlier processes of the same run included.
        seconds_before: what earlier processes of the same run used.
    """

    calls: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    used_calls: int = 0
    used_tokens: int = 0
    seconds_before: float = 0.0
    reserved: int = 0
    _began: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        for name in ("calls", "tokens", "seconds"):
            limit = getattr(self, name)
            if limit is not None and limit <= 0:
                raise ValueError(f"a budget of {limit} {name} covers nothing; leave it out for no limit")

    def used_seconds(self) -> float:
        """Wall-clock so far."""
        return self.seconds_before + time.monotonic() - self._began

    def seconds_left(self) -> float:
        """Wall-clock that remains; infinite without a limit."""
        return float("inf") if self.seconds is None else self.seconds - self.used_seconds()

    def take(self, tokens: int) -> None:
        """Take one call of at most `tokens` tokens, which `settle` gives back.

        Raises:
            BudgetSpent: it would pass a limit.
        """
        with self._lock:
            if self.calls is not None and self.used_calls >= self.calls:
                raise BudgetSpent(f"all {self.calls} calls are made")
            if self.seconds_left() <= 0:
                raise BudgetSpent(f"the time of {self.seconds:g} s is over")
            if self.tokens is not None and self.used_tokens + self.reserved + tokens > self.tokens:
                raise BudgetSpent(
                    f"{self.used_tokens} of {self.tokens} tokens are used, {self.reserved} may come of requests on "
                    f"their way, and another may take {tokens}"
                )
            self.used_calls += 1
            self.reserved += tokens

    def settle(self, taken: int, used: int) -> None:
        """A call that had taken `taken` tokens used `used` of them."""
        with self._lock:
            self.reserved -= taken
            self.used_tokens += used
