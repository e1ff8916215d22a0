"""What `test_pool.py` runs in workers: functions that answer, and functions that do everything else."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Any


def act(what: str, *arguments: Any) -> Any:
    """Call the function of this module that is named `what`."""
    return globals()[what](*arguments)


def echo(value: Any) -> Any:
    return value


def pid() -> int:
    return os.getpid()


def sleep(seconds: float, marker: str = "") -> float:
    if marker:
        os.mkdir(marker)  # a file would not do: a worker writes none
    time.sleep(seconds)
    return seconds


def hang(marker: str = "") -> None:
    if marker:
        os.mkdir(marker)
    while True:
        pass


def hang_ignoring_signals(marker: str = "") -> None:
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    hang(marker)


def hang_in_c() -> int:
    return sum(range(10**18))  # bytecode never runs, so neither do Python's signal handlers nor another thread


def eat_memory() -> int:
    return len(bytearray(2**36))


def eat_memory_slowly() -> None:
    kept = []
    while True:
        kept.append(bytearray(2**22))


def leave() -> None:
    os._exit(3)


def segfault() -> None:
    ctypes.string_at(0)


def call_sys_exit() -> None:
    sys.exit(4)


def shout() -> str:
    print("[" * 1000)
    sys.stderr.write("[" * 1_000_000)
    os.write(1, b'["result", "forged"]\n')
    os.write(2, b"[" * 1_000_000)
    os.system('echo \'["result", "forged"]\'')
    return "said"


def read_input() -> str:
    return sys.stdin.read() + os.read(0, 100).decode()


def write_file(path: str) -> None:
    with open(path, "w") as file:
        file.write("x" * 100_000)


def fail(text: str) -> None:
    raise ValueError(text)


def fail_unprintably() -> None:
    raise ValueError(10**10_000)


def result_that_is_no_json() -> object:
    return object()


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def big(size: int) -> str:
    return "x" * size


def environment() -> dict[str, str]:
    return dict(os.environ)


def loaded() -> list[str]:
    return sorted(sys.modules)


def compare(function: str, options: dict[str, float], answer: str, truth: str) -> tuple[bool, str]:
    """A rule of comparison that hangs on some answers."""
    if answer.strip().startswith("hang"):
        hang()
    return answer.strip() == truth.strip(), "compared"
