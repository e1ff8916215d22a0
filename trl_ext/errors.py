"""Errors that end a program with one line instead of a traceback."""

from __future__ import annotations

import signal


class Stopped(Exception):
    """A signal asked the run to stop; it has saved a checkpoint and done so."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}")
        self.signal = number


class InputError(ValueError):
    """The user's input cannot be used; the message says what, where, and what to do."""


class SettingsError(InputError):
    """Settings that cannot be used."""

    def __init__(self, message: str, frames: str = "", field: str | None = None) -> None:
        super().__init__(message)
        self.frames = frames  # lines of the user's own file that led there, as a traceback has them
        self.field = field  # the setting at fault, where it is known


class NotSavedError(RuntimeError):
    """The model that was trained could not be written."""


class PushError(RuntimeError):
    """Nothing or not everything could be pushed; the message has the command to try again."""


class ServerError(RuntimeError):
    """A vLLM server was lost or answered with an error in the middle of a run."""
