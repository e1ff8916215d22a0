"""Launched programs with all their processes, found by a mark in the environment."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TypeVar

import psutil

MARK = "TRL_EXT_TEST_MARK"


class Marked:
    """Processes that were started with `environment`, and theirs, whatever session they are in."""

    def __init__(self) -> None:
        self.environment = {MARK: uuid.uuid4().hex}

    def alive(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.environment[MARK] and process.status() != "zombie":
                    found.append(process)
        return found


M = TypeVar("M", bound=Marked)


@contextlib.contextmanager
def ended(started: M) -> Iterator[M]:
    """What is left of the processes at the end of the block is killed."""
    try:
        yield started
    finally:
        alive = started.alive()
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, 10)


def wait_for(condition: Callable[[], object], seconds: float = 100) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)
