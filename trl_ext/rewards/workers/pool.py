"""Runs a function on hostile input in processes that can be killed: a hang, a crash or full memory costs one job."""

from __future__ import annotations

import json
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from trl_ext.rewards.workers.process import Failure, Outcome, PoolError, Process, WorkerLimits

__all__ = ["Failure", "Outcome", "Pool", "PoolError", "WorkerLimits"]

_MAX_SENT = 64  # jobs sent to a worker ahead of its answers
_ALL_FAILED = 8  # if every job of a map of at least this size fails, the function is broken and not the jobs;
_FAILED_IN_A_ROW = 32  # the same holds for this many failures in a row, over several maps
_LONGEST_WAIT = 1.0  # seconds; a signal that comes just before poll() is noticed only after it
_DEFAULT = WorkerLimits()


class Pool:
    """Workers for one function. They start with `start` or the first `map`, and live until `close` or the end.

    Args:
        function: "module:name" or "file.py:name" of a function of JSON-able arguments with a JSON-able result, imported
            in the workers.
        all_may_fail: failures are the jobs' own, however many there are, as where a model writes the arguments.
    """

    def __init__(self, function: str, limits: WorkerLimits = _DEFAULT, all_may_fail: bool = False) -> None:
        self.function, self.limits, self.all_may_fail = function, limits, all_may_fail
        self.restarted = 0  # workers that were replaced
        self._processes: list[Process] = []
        self._lock = threading.Lock()
        self._failed_in_a_row = 0
        weakref.finalize(self, _kill_all, self._processes)
        _POOLS.add(self)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pids(self) -> list[int]:
        """The workers' process ids."""
        return [process.popen.pid for process in self._processes]

    def close(self) -> None:
        """Kill the workers. Another `map` would start new ones."""
        with self._lock:
            _kill_all(self._processes)

    def start(self) -> None:
        """Start the workers without waiting for them, so that they import while other things are done."""
        with self._lock:
            self._start(self.limits.workers)

    def map(self, jobs: Sequence[Sequence[Any]]) -> list[Outcome]:
        """For every job the function's result, or a `Failure`. Several threads take turns.

        A `PoolError` says that a worker does not start, or that so many jobs fail that they cannot be the cause.
        """
        lines = [json.dumps(job).encode() + b"\n" for job in jobs]
        with self._lock:
            try:
                return self._run(lines)
            except BaseException:  # KeyboardInterrupt too: the workers are in the middle of jobs
                _kill_all(self._processes)
                self._failed_in_a_row = 0
                raise

    def _run(self, lines: list[bytes]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        waiting = deque(range(len(lines)))
        sent_again: set[int] = set()
        self._start(len(lines))
        while len(outcomes) < len(lines):
            for process in self._processes:
                self._feed(process, waiting, lines)
            _wait(self._processes)
            for process in list(self._processes):
                for index, outcome in process.receive():
                    if isinstance(outcome, Failure) and process.was_killed and index not in sent_again:
                        sent_again.add(index)  # the signal came from outside, possibly before the job did
                        waiting.append(index)
                        continue
                    outcomes[index] = outcome
                    self._failed_in_a_row = self._failed_in_a_row + 1 if isinstance(outcome, Failure) else 0
                    if self._failed_in_a_row >= _FAILED_IN_A_ROW and not self.all_may_fail:
                        raise self._pool_error(f"{self._failed_in_a_row} jobs in a row", outcome, lines[index])
                if process.is_lost:
                    waiting.extend(process.sent)
                    self._replace(process)
        failed = sum(isinstance(outcome, Failure) for outcome in outcomes.values())
        if failed == len(lines) >= _ALL_FAILED and not self.all_may_fail:
            raise self._pool_error(f"all {len(lines)} jobs of a map", outcomes[0], lines[0])
        return [outcomes[index] for index in range(len(lines))]

    def _start(self, jobs: int) -> None:
        for process in list(self._processes):
            if process.sent or process.popen.poll() is not None:  # left by an interrupted map, or dead since the last
                self._replace(process)
        while len(self._processes) < min(self.limits.workers, jobs):
            self._processes.append(Process(self.function, self.limits))

    def _replace(self, process: Process) -> None:
        process.kill()
        self._processes[self._processes.index(process)] = Process(self.function, self.limits)
        self.restarted += 1

    def _feed(self, process: Process, waiting: deque[int], lines: list[bytes]) -> None:
        batch = min(_MAX_SENT, 1 + len(waiting) // (2 * len(self._processes)))  # smaller near the end, for balance
        if waiting and process.is_ready and len(process.sent) <= batch // 2:
            indices = [waiting.popleft() for _ in range(min(batch, len(waiting)))]
            process.enqueue(indices, b"".join(lines[index] for index in indices))
        process.flush()

    def _pool_error(self, jobs: str, failure: Failure, line: bytes) -> PoolError:
        return PoolError(
            f"{jobs} got no result from {self.function} (e.g. {failure.kind}: {failure.detail}). Call it on "
            f"{line[:200].decode().strip()}; if it works there, {self.limits} is too tight or the machine too busy."
        )


def _wait(processes: list[Process]) -> None:
    """Wait until a worker has answered, died or can take more jobs, or until the first deadline."""
    poll = select.poll()  # not select(), which knows only the first 1024 files
    for process in processes:
        poll.register(process.answers, select.POLLIN)
        if process.unsent:
            poll.register(process.jobs, select.POLLOUT)
    seconds = min(process.deadline for process in processes) - time.monotonic()
    poll.poll(min(max(0.0, seconds), _LONGEST_WAIT) * 1000)


def _kill_all(processes: list[Process]) -> None:
    for process in processes:
        process.kill()
    processes.clear()


_POOLS: weakref.WeakSet[Pool] = weakref.WeakSet()


def _after_fork() -> None:
    """A forked child starts its own workers; the lock may be held by a thread that it does not have."""
    for pool in _POOLS:
        pool._lock = threading.Lock()
        for process in pool._processes:
            process.detach_after_fork()
        pool._processes.clear()


os.register_at_fork(after_in_child=_after_fork)
