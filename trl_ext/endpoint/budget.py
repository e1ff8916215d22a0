"""What a run may spend: calls, tokens and time, reserved before they are spent so that no limit is exceeded."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field


class BudgetSpent(Exception):
    """The budget does not cover another call; the message says which part of it is spent."""


@dataclass
class Budget:
    """The limits of a run, and what it has used of them. Thread-safe.

    Attributes:
        calls: requests to the endpoint, retries included.
        tokens: those of prompts and answers together.
        seconds: wall-clock time, earlier processes of the same run included.
        seconds_before: wall-clock time that earlier processes of the same run used.
        reserved: tokens that requests in flight may use.
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
        limits = {"max_calls": self.calls, "max_total_tokens": self.tokens, "max_seconds": self.seconds}
        for name, limit in limits.items():
            if limit is not None and limit <= 0:
                raise ValueError(f"{name} must be positive, got {limit} (omit it for no limit)")

    def used_seconds(self) -> float:
        """Wall-clock time so far."""
        return self.seconds_before + time.monotonic() - self._began

    def seconds_left(self) -> float:
        """Wall-clock time that remains; infinite without a limit."""
        return float("inf") if self.seconds is None else self.seconds - self.used_seconds()

    def take(self, tokens: int) -> None:
        """Count one call and reserve `tokens` tokens until `settle`.

        Raises:
            BudgetSpent: it would exceed a limit.
        """
        with self._lock:
            if self.calls is not None and self.used_calls >= self.calls:
                raise BudgetSpent(f"all {self.calls} calls are made")
            if self.seconds_left() <= 0:
                raise BudgetSpent(f"the time of {self.seconds:g} s is over")
            if self.tokens is not None and self.used_tokens + self.reserved + tokens > self.tokens:
                raise BudgetSpent(
                    f"{self.used_tokens} of {self.tokens} tokens are used, {self.reserved} are reserved for requests "
                    f"in flight, and another may take {tokens}"
                )
            self.used_calls += 1
            self.reserved += tokens

    def settle(self, taken: int, used: int) -> None:
        """Release the `taken` tokens of a call, of which it used `used`."""
        with self._lock:
            self.reserved -= taken
            self.used_tokens += used
