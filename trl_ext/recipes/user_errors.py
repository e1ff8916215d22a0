"""An error that began in a file of the user's own: the lines that matter of a long traceback."""

from __future__ import annotations

import traceback

from trl_ext.errors import is_own


def lines_of_user_files(error: BaseException) -> str:
    """The end of the traceback that begins in a user's file, of what caused `error` or of it; empty without one."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    for link in reversed(chain):
        frames = traceback.extract_tb(link.__traceback__)
        own = [is_own(frame.filename) for frame in frames]
        if any(own):
            last = len(own) - 1 - own[::-1].index(True)
            first = next((place + 1 for place in range(last, -1, -1) if not own[place]), 0)
            return "".join(traceback.format_list(frames[first:]))
    return ""


def summary_of(error: BaseException) -> str:
    """The error in one line; the type stands before messages of Python's, which mean little without it."""
    message = str(error)
    if not (type(error).__module__.startswith("trl_ext") and message):
        message = f"{type(error).__name__}: {message}"
    return "; ".join([message, *getattr(error, "__notes__", ())])
