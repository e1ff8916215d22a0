"""The process of one stage of a pipeline: waited for, told to stop, and never left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from trl_ext.errors import InputError, Stopped
from trl_ext.hosts.shutdown_timeout import patient_environment

_TICK = 1.0  # seconds
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # before a fork, after which nothing should be loaded


def run_stage(command: Sequence[str], name: str, tick: Callable[[], Any] = lambda: None) -> None:
    """Wait for a stage; SIGTERM and Ctrl-C are passed on to all of its processes, a launcher's ranks included.

    Should `tick` raise, all of them are killed; should this process be killed, the stage is told to stop.
    """
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=_stop_with_parent, env=patient_environment())
    told: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        told.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    code = None
    try:
        while code is None:
            try:
                code = process.wait(_TICK)
            except subprocess.TimeoutExpired:
                tick()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # none of the group is left
            while told:  # a launcher may end before what it has launched
                os.killpg(process.pid, 0)
                time.sleep(0.1)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if signal.SIGINT in told:
        raise KeyboardInterrupt
    if told or code in (-signal.SIGTERM, 128 + signal.SIGTERM):
        raise Stopped(signal.SIGTERM, 0)
    if code:
        raise InputError(f"stage {name} failed with exit status {code} (output above). The same command resumes there")


def _stop_with_parent() -> None:
    """SIGTERM for this process when its parent is gone; only Linux knows it."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
