"""A process that runs for another one: waited for, told to stop, and never left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from trl_ext.errors import InputError, Stopped
from trl_ext.hosts.shutdown_timeout import patient_environment

_TICK = 1.0  # seconds
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # before a fork, after which nothing should be loaded


def run_process(
    command: Sequence[str],
    tick: Callable[[], Any] = lambda: None,
    environment: Mapping[str, str] | None = None,
    log: IO[str] | None = None,
) -> int:
    """Wait for a process, call `tick` every second, and return its exit status.

    From the main thread, which alone can handle signals, SIGTERM and Ctrl-C are passed on to all of its processes, a
    launcher's ranks included; should `tick` raise, all of them are killed; should this process be killed, it is told
    to stop. From another thread it is one of this process's group, which a terminal's Ctrl-C reaches by itself.

    Raises:
        KeyboardInterrupt, Stopped: it was told to stop, and has.
    """
    is_main = threading.current_thread() is threading.main_thread()
    group: dict[str, Any] = {"start_new_session": True, "preexec_fn": _stop_with_parent} if is_main else {}
    environment = patient_environment() if environment is None else environment
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, **group)
    with _signals_passed_on(process.pid, (signal.SIGTERM, signal.SIGINT) if is_main else ()) as told:
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
            process.kill()
            process.wait()
            raise
    if signal.SIGINT in told:
        raise KeyboardInterrupt
    if told:
        raise Stopped(signal.SIGTERM, 0)
    return code


@contextlib.contextmanager
def _signals_passed_on(group: int, signals: Sequence[signal.Signals]) -> Iterator[list[int]]:
    """In the block, signals go to all processes of a group; yields those that came."""
    told: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        told.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)

    before = {number: signal.signal(number, pass_on) for number in signals}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_stage(command: Sequence[str], name: str, tick: Callable[[], Any] = lambda: None) -> None:
    """Wait for a stage of a pipeline: `run_process`, and an InputError if it failed, Stopped if it was stopped."""
    code = run_process(command, tick)
    if code in (-signal.SIGTERM, 128 + signal.SIGTERM):
        raise Stopped(signal.SIGTERM, 0)
    if code:
        raise InputError(f"stage {name} failed with exit status {code} (output above). The same command resumes there")


def _stop_with_parent() -> None:
    """SIGTERM for this process when its parent is gone; only Linux knows it."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
