"""One worker process of a `Pool`, seen from the parent: its pipes, its deadline and the outcomes of its jobs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

_START_SECONDS = 60.0  # for a worker's imports
_END_SECONDS = 1.0  # from the end of a worker's answers to its exit
_MAX_STDERR = 2000  # bytes shown of what a worker wrote before it failed to start
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME")


class PoolError(RuntimeError):
    """The workers do not start or return no results: the function or the machine is at fault, not a job."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What the jobs may use."""

    seconds: float = 2.0  # wall-clock time of a job
    memory_mb: int = 1024  # MiB of address space of a worker in addition to its imports; not enforced on macOS
    workers: int = 2  # processes

    def __post_init__(self) -> None:
        if min(self.seconds, self.memory_mb, self.workers) <= 0:
            raise ValueError(f"every limit must be positive, got {self}")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job has no result: an exception is an `error`; every other kind also ends the worker."""

    kind: Literal["timeout", "memory", "crash", "error"]
    detail: str


Outcome: TypeAlias = Any  # the function's result or a Failure


class Process:
    """A worker, and the jobs that it was sent and has not answered; the first of them is running."""

    def __init__(self, function: str, limits: WorkerLimits) -> None:
        self.sent: deque[int] = deque()
        self.is_ready = self.is_lost = self._ended_alone = False
        self._function, self._seconds = function, limits.seconds
        self.unsent, self._unread = bytearray(), bytearray()  # of jobs, because the pipe is full; of answers
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - not a pipe, which could fill up
        lifeline, ours = os.pipe()
        self._lifeline = os.fdopen(ours, "wb", 0)
        arguments = [function, str(limits.memory_mb), str(lifeline)]
        try:
            self.popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "trl_ext.rewards.workers.worker", *arguments],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                pass_fds=[lifeline],
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the parent, which kills its workers
            )
        finally:
            os.close(lifeline)
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.jobs, self.answers = self.popen.stdin, self.popen.stdout
        os.set_blocking(self.jobs.fileno(), False)
        os.set_blocking(self.answers.fileno(), False)
        self.deadline = time.monotonic() + _START_SECONDS

    @property
    def was_killed(self) -> bool:
        """Whether a SIGKILL that the pool did not send ended it."""
        return self._ended_alone and self.popen.returncode == -signal.SIGKILL

    def enqueue(self, indices: list[int], lines: bytes) -> None:
        """Put jobs in the queue that `flush` empties."""
        if not self.sent:
            self.deadline = time.monotonic() + self._seconds
        self.sent.extend(indices)
        self.unsent += lines

    def flush(self) -> None:
        """Send as much as the pipe takes, without waiting."""
        try:
            while self.unsent:
                del self.unsent[: os.write(self.jobs.fileno(), self.unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # `receive` notices that it died
            self.unsent.clear()

    def receive(self) -> list[tuple[int, Outcome]]:
        """The outcomes of jobs since the last call, without waiting; a `PoolError` if it did not start."""
        data = self._read()
        outcomes = []
        for kind, value in _replies(self._unread) if data else ():
            self.deadline = time.monotonic() + self._seconds
            if kind == "ready":
                self.is_ready = True
                continue
            outcomes.append((self.sent.popleft(), value if kind == "result" else Failure(kind, value)))
            if kind == "memory":  # it keeps running, in an unknown state
                self.is_lost = True
                return outcomes
        if self.is_ready and not self.sent:
            self.deadline = math.inf
        if data == b"" or time.monotonic() >= self.deadline:
            outcomes += self._lose(is_late=data != b"")
        return outcomes

    def _read(self) -> bytes | None:
        """New data, None if there is none, b"" at the end."""
        try:
            data = os.read(self.answers.fileno(), 2**16)
        except BlockingIOError:
            return None
        self._unread += data
        return data

    def _lose(self, is_late: bool) -> list[tuple[int, Failure]]:
        if not is_late:
            self._ended_alone = True
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(_END_SECONDS)  # for its own exit status, not that of `kill`
        size = os.fstat(self._stderr.fileno()).st_size
        stderr = os.pread(self._stderr.fileno(), _MAX_STDERR, max(0, size - _MAX_STDERR)).decode(errors="replace")
        self.kill()
        self.is_lost = True
        end = "took too long" if is_late else _how_it_ended(self.popen.returncode)
        if not self.is_ready:
            raise PoolError(f"a worker for {self._function} did not start: it {end}. It wrote:\n{stderr}")
        failure = Failure("timeout", f"no result in {self._seconds:g} s") if is_late else Failure("crash", end)
        return [(self.sent.popleft(), failure)] if self.sent else []

    def kill(self) -> None:
        """End the process, whatever it is doing. Its unanswered jobs are still in `sent`."""
        self.popen.kill()
        self.popen.wait()
        self._close()

    def detach_after_fork(self) -> None:
        """In a forked child, leave the process to the parent."""
        self.popen.returncode = 0  # else Popen warns that it is still running
        self._close()

    def _close(self) -> None:
        for file in (self._lifeline, self.jobs, self.answers, self._stderr):
            file.close()


def _replies(unread: bytearray) -> Iterator[tuple[Any, Any]]:
    """Remove the complete lines from `unread` and decode them."""
    end = unread.rfind(b"\n") + 1
    lines = unread[:end].splitlines()
    del unread[:end]
    for line in lines:
        try:
            kind, value = json.loads(line)
        except RecursionError:  # the worker could nest it, but here the stack is deeper
            kind, value = "error", "the result is nested too deeply"
        yield kind, value


def _environment() -> dict[str, str]:
    """No secrets, the same imports, one thread, no GPU, and a fixed hash seed (so a fixed order of sets)."""
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return kept | {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def _how_it_ended(status: int) -> str:
    if status < 0:
        return f"was killed by signal {-status} ({signal.strsignal(-status)})"
    return f"exited with status {status}"
