"""The process in which a `Pool` runs its function: a JSON array of arguments per line in, `[kind, value]` per line out.

`pool` starts it as `python -m trl_ext.rewards.workers.worker function memory_mb lifeline`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from trl_ext.registry import import_function

_MAX_DETAIL = 500  # characters of an exception's message


def main() -> None:
    """Import the function, report that it is ready, and answer jobs until the pipe is closed."""
    function_path, memory_mb, lifeline = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    jobs, answers = _take_pipes()
    _die_with_parent(lifeline)
    function = import_function(function_path, "worker")
    _set_limits(memory_mb)
    _send(answers, b'["ready", null]\n')
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the pool shows what was written before; nobody reads more
    for job in jobs:
        _send(answers, _answer(function, job))


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the pool's pipes away from the standard streams, which the function may read from and print to."""
    jobs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    return jobs, answers


def _die_with_parent(lifeline: int) -> None:
    """Have the kernel kill this process, whatever it is doing, when the pool's end of the pipe `lifeline` is closed.

    PR_SET_PDEATHSIG would kill it as soon as the thread that started it ends.
    """
    if sys.platform == "linux":
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _set_limits(memory_mb: int) -> None:
    """No core dumps, no writes to files and, on Linux, `memory_mb` MiB of address space in addition to the imports."""
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_FSIZE, 0)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _set_limit(resource.RLIMIT_AS, pages * resource.getpagesize() + memory_mb * 2**20)


def _set_limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _answer(function: Callable[..., Any], job: bytes) -> bytes:
    try:
        return json.dumps(["result", function(*json.loads(job))]).encode() + b"\n"
    except MemoryError:
        return b'["memory", "MemoryError"]\n'
    except BaseException as error:  # SystemExit too
        return json.dumps(["error", _describe(error)]).encode() + b"\n"


def _describe(error: BaseException) -> str:
    with contextlib.suppress(Exception):  # the message may hold an integer too long to print
        return repr(error)[:_MAX_DETAIL]
    return type(error).__name__


def _send(answers: BinaryIO, line: bytes) -> None:
    answers.write(line)
    answers.flush()  # immediately, so that the pool knows which job is running


if __name__ == "__main__":
    main()
