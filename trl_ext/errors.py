"""Errors that end a program with one line instead of a traceback."""

from __future__ import annotations

import signal


class Stopped(Exception):
    """A signal asked the run to stop; it has saved a checkpoint and done so.

    Attributes:
        signal: its number.
    """

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}")
        self.signal = number


class InputError(ValueError):
    """The user's input cannot be used; the message says what, where, and what to do."""


class NotSavedError(RuntimeError):
    """The model that was trained could not be written."""


class PushError(RuntimeError):
    """Nothing or not everything could be pushed; the message has the command to try again."""
