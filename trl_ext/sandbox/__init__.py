"""Runs an untrusted program, and returns its globals as plain values, or what it printed.

The program gets a process, a session and an empty folder of its own, limits on time, memory, processes, output and
files, no rights, an environment without secrets, and, where the system allows namespaces (most Linux machines, few
containers), no network, no view of other processes and a read-only file system of its own, in which there is nothing
but Python, its packages, the system's shared libraries, time zones and four devices (`filesystem.needed_paths`).
What was in force, as its process found out just before the program ran, is part of every result. Nothing that comes
back is trusted: it is JSON of bounded size, and only what a verifier accepts counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from trl_ext.sandbox.limits import (
    ISOLATION,
    Kind,
    Limits,
    ProgramFailure,
    ProgramOutcome,
    ProgramResult,
    SandboxError,
)

__all__ = ["Limits", "ProgramFailure", "ProgramResult", "SandboxError", "run_blocks", "run_program"]

_SUPERVISOR = "trl_ext.sandbox.supervisor"
_IMPORTS = Path(__file__).parents[2]  # the only entry of the supervisor's import path that comes from this process
_START_SECONDS = 60.0  # until the program begins, on a busy machine
_END_SECONDS = 20.0  # for the supervisor to clean up
_SHOWN = 2000  # characters of an error that are kept
_INHERITED = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "TMPDIR")
_MARK = "TRL_EXT_SANDBOX"


class Supervisor(Protocol):
    """The process that supervises one program."""

    def ends_within(self, seconds: float) -> bool:
        """Wait so long for its end; whether it has come."""

    def kill(self) -> None:
        """End it at once."""


Starter = Callable[[IO[bytes], int, Mapping[str, int], Mapping[str, Any], str], Supervisor]


def run_program(
    program: str | bytes, names: Sequence[str], limits: Limits | None = None, start: Starter | None = None
) -> ProgramOutcome:
    """Run `program` and return its globals `names`. Thread-safe.

    Args:
        start: starts the supervisor; None for a Python of its own.

    Raises:
        SandboxError: no program can be run on this machine.
    """
    text = program.encode(errors="surrogatepass") if isinstance(program, str) else program
    return _run(text, {"names": list(names)}, limits or Limits(), start)


def run_blocks(blocks: Sequence[str], limits: Limits, start: Starter | None = None) -> ProgramOutcome:
    """Run blocks of code one after the other in one space, as a notebook does, and return what the last one printed.

    The value of an expression at its end is printed too. What the earlier ones print or raise is left out.

    Raises:
        SandboxError: no program can be run on this machine.
    """
    return _run(json.dumps(list(blocks)).encode(), {"names": [], "blocks": True}, limits, start)


def _run(data: bytes, asked: Mapping[str, Any], limits: Limits, start: Starter | None) -> ProgramOutcome:
    with tempfile.TemporaryFile() as source:
        source.write(data)
        source.seek(0)
        supervised = _Supervised(source, asked, limits, start or _start_python)
    try:
        is_over_time = supervised.follow()
    finally:
        supervised.end()
    return supervised.outcome(is_over_time)


class _Python:
    """A supervisor in a Python of its own."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self.popen = popen

    def ends_within(self, seconds: float) -> bool:
        """Wait so long for its end; whether it has come."""
        try:
            self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it at once."""
        self.popen.kill()
        self.popen.wait()


def _start_python(
    source: IO[bytes], output: int, files: Mapping[str, int], settings: Mapping[str, Any], mark: str
) -> Supervisor:
    return _Python(
        subprocess.Popen(
            [*supervisor_command(), json.dumps({**settings, **files})],
            stdin=source,
            stdout=output,
            stderr=output,
            pass_fds=list(files.values()),
            env=supervisor_environment(mark),
            start_new_session=True,  # Ctrl-C is for this process; when it ends, the lifeline closes
        )
    )


def supervisor_command() -> list[str]:
    """The command of a supervisor, without its arguments."""
    return [sys.executable, "-s", "-P", "-B", "-m", _SUPERVISOR]


@dataclass
class _Pipe:
    """The data read from one pipe, up to a limit."""

    file: int
    most: int
    data: bytearray = field(default_factory=bytearray)

    def read(self) -> bytes | None:
        """Read the data that is there: b"" at the end, None if there is nothing yet."""
        try:
            new = os.read(self.file, 2**16)
        except BlockingIOError:
            return None
        self.data += new
        return new

    @property
    def is_over(self) -> bool:
        return len(self.data) > self.most


class _Supervised:
    """One run: the supervisor's process, and the pipes from it and from the program."""

    def __init__(self, source: IO[bytes], asked: Mapping[str, Any], limits: Limits, start: Starter) -> None:
        self.limits, self.mark = limits, uuid.uuid4().hex
        ends = {name: os.pipe() for name in ("result", "output", "status", "lifeline")}
        theirs = {name: ends[name][1] for name in ("result", "status")} | {"lifeline": ends["lifeline"][0]}
        try:
            self.supervisor = start(source, ends["output"][1], theirs, {**asdict(limits), **asked}, self.mark)
        except BaseException:
            for name in ("result", "output", "status"):
                os.close(ends[name][0])
            os.close(ends["lifeline"][1])
            raise
        finally:
            for file in (*theirs.values(), ends["output"][1]):
                os.close(file)
        self.result = _Pipe(ends["result"][0], limits.result_bytes)
        self.output = _Pipe(ends["output"][0], limits.output_bytes)
        self.status = _Pipe(ends["status"][0], 2**16)
        self.pipes = (self.result, self.output, self.status)
        self.lifeline = ends["lifeline"][1]
        self.began: float | None = None
        for pipe in self.pipes:
            os.set_blocking(pipe.file, False)

    def follow(self) -> bool:
        """Read until the supervisor has ended or a limit is exceeded; whether that is the time limit."""
        deadline = time.monotonic() + _START_SECONDS
        with selectors.DefaultSelector() as selector:
            for pipe in self.pipes:
                selector.register(pipe.file, selectors.EVENT_READ, pipe)
            while True:
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    if key.data.read() == b"":
                        selector.unregister(key.fd)
                        if key.data is self.status:
                            return False
                if self.began is None and self.status.data:
                    self.began = time.monotonic()
                    deadline = self.began + self.limits.seconds
                if self.output.is_over or self.result.is_over:
                    return False
                if time.monotonic() >= deadline:
                    return True

    def end(self) -> None:
        """Have everything killed, and read what is left in the pipes."""
        self.seconds = time.monotonic() - self.began if self.began else 0.0
        os.close(self.lifeline)
        if not self.supervisor.ends_within(_END_SECONDS):
            self.supervisor.kill()
        for pipe in self.pipes:
            while not pipe.is_over and pipe.read():
                pass
            os.close(pipe.file)
        self.said: dict[str, Any] = {}
        for line in bytes(self.status.data).splitlines():
            with contextlib.suppress(ValueError, TypeError):
                self.said = {**json.loads(line), **self.said}  # the first value, from before the program ran, counts
        self.isolation = tuple(name for name in ISOLATION if name in self.said.get("isolation", ()))
        if "processes" not in self.isolation:
            _kill_marked(self.mark)

    def outcome(self, is_over_time: bool) -> ProgramOutcome:
        """The outcome of the program."""
        output, limits = bytes(self.output.data).decode(errors="replace"), self.limits
        if self.began is None or "isolation" not in self.said:
            raise SandboxError(f"the sandbox did not start. It wrote:\n{output[-_SHOWN:]}")
        run = (output[: limits.shown], round(self.seconds, 3), self.isolation)

        def failure(kind: Kind, detail: str) -> ProgramFailure:
            return ProgramFailure(kind, detail, *run)

        if is_over_time:
            return failure("timeout", f"it did not end within {limits.seconds:g} s")
        if self.output.is_over:
            return failure("output", f"it printed more than {limits.output_bytes} bytes")
        if self.result.is_over:
            return failure("result", f"the result takes more than {limits.result_bytes} bytes")
        if self.said.get("over_memory") is True:
            return failure("memory", f"its processes need more than {limits.memory_mb} MiB of memory")
        reply = _reply(bytes(self.result.data))
        if reply is None:
            return failure("crash", _how_it_ended(self.said.get("status"), bool(self.result.data)))
        if "values" in reply:
            return ProgramResult(reply["values"], *run)
        if reply["error"] == "memory":
            return failure("memory", f"it needs more than {limits.memory_mb} MiB of memory")
        return failure("result" if reply["error"] == "result" else "error", str(reply.get("detail"))[:_SHOWN])


def _reply(data: bytes) -> dict[str, Any] | None:
    """The one JSON object that a program's process sends; None for anything else, which the program may have sent."""
    try:
        reply = json.loads(data)
    except (ValueError, RecursionError):
        return None
    is_reply = isinstance(reply, dict) and (isinstance(reply.get("values"), dict) or "error" in reply)
    return reply if is_reply else None


def supervisor_environment(mark: str = "") -> dict[str, str]:
    """No secrets, one thread, and a fixed order of sets."""
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    python = {"PYTHONPATH": str(_IMPORTS), "PYTHONHASHSEED": "0"}
    return kept | threads | python | {"PATH": os.defpath, "LANG": "C.UTF-8", _MARK: mark}


def _how_it_ended(status: object, has_sent: bool) -> str:
    if has_sent:
        return "its process sent something that is no result"
    try:
        code = os.waitstatus_to_exitcode(status) if isinstance(status, int) else None
    except (ValueError, OverflowError):
        code = None
    if code is None:
        return "its process was killed"
    how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
    return f"its process {how} before its globals could be read"


def _kill_marked(mark: str) -> None:
    """Kill what escaped the supervisor, by the mark in its environment; needed without a process namespace."""
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(_MARK) == mark:
                process.kill()
