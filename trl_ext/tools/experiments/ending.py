"""How a program of many runs ends before its time: an error is one line, and what was interrupted can be resumed."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

from trl_ext.errors import InputError, Stopped
from trl_ext.redaction import redact_text


@contextlib.contextmanager
def ending_in_a_line(how_to_resume: str = "the same command resumes it") -> Iterator[None]:
    """What the block raises for the user ends the process; the status of a signal is the one that a shell reports."""
    try:
        yield
    except InputError as error:
        sys.exit(f"error: {redact_text(str(error))}")
    except Stopped as stopped:
        sys.exit(128 + stopped.signal)
    except KeyboardInterrupt:
        print(f"\ninterrupted; {how_to_resume}", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
