"""Errors that end a program with one line instead of a traceback."""

from __future__ import annotations

import functools
import signal
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import TypeVar

C = TypeVar("C", bound=type)

_PACKAGE = Path(__file__).parent
_INSTALLED = (_PACKAGE, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib")))


def is_own(filename: str) -> bool:
    """Whether a traceback's frame is in a file, or a notebook's cell, of the user's own."""
    path = Path(filename)
    if filename.startswith("<") or path == Path(sys.argv[0]).absolute() or "site-packages" in path.parts:
        return False
    return not any(path.is_relative_to(folder) for folder in _INSTALLED)


def lines_in_notebook(error: BaseException) -> list[str]:
    """An error of the user's input as a notebook shows it: the user's own lines that led there, and the message."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)]
    places = [frame.filename if Path(frame.filename).is_file() else "cell" for frame in own]
    where = [f"{place}, line {frame.lineno}: {frame.line}" for place, frame in zip(places, own, strict=True)]
    return [*where, f"{type(error).__name__}: {error}"]


def brief_in_notebooks(cls: C) -> C:
    """Class decorator: a `ValueError` of the constructor, TRL's and transformers' too, has few lines in a notebook."""
    init = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def brief(self: object, *args: object, **kwargs: object) -> None:
        try:
            init(self, *args, **kwargs)
        except ValueError as error:
            error._render_traceback_ = functools.partial(lines_in_notebook, error)  # type: ignore[attr-defined]
            raise

    cls.__init__ = brief  # type: ignore[misc]
    return cls


class Stopped(Exception):
    """A signal asked the run to stop; it has saved a checkpoint and done so, or written what it has graded."""

    def __init__(self, number: int, step: int | None = None) -> None:
        where = "" if step is None else f" after step {step}"
        super().__init__(f"stopped by {signal.Signals(number).name}{where}")
        self.signal = number


class InputError(ValueError):
    """The user's input cannot be used; the message says what, where, and what to do."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return lines_in_notebook(self)


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
