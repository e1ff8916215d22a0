"""Runs a program that nobody has read, and gives its globals back as plain values.

The program gets a process, a session and an empty folder of its own, limits on time, memory, processes, output and
files, no rights, an environment without secrets, and, where the system allows namespaces (most Linux machines, few
containers), no network, no sight of other processes and a read-only file system without homes, /run, /tmp and devices.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trl_ext.compat.renamed import earlier_names_in
from trl_ext.discovery.sandbox.limits import (
    ISOLATION,
    Limits,
    ProgramFailure,
    ProgramOutcome,
    ProgramResult,
    SandboxError,
)

__all__ = ["Limits", "ProgramFailure", "ProgramResult", "SandboxError", "run_program"]

_JAIL = "trl_ext.discovery.sandbox.supervisor"
_IMPORTS = Path(__file__).parents[3]  # where that is found; nothing else of the parent's path
_START_SECONDS = 60.0  # until the program begins, on a busy machine
_END_SECONDS = 20.0  # for the supervisor to clean up
_SHOWN = 2000  # characters of the program's output that are kept
_INHERITED = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "TMPDIR")
_MARK = "TRL_EXT_SANDBOX"


def run_program(program: str | bytes, names: Sequence[str], limits: Limits | None = None) -> ProgramOutcome:
    """Run `program` and return its globals `names`. Several threads may do so at once.

    Raises:
        SandboxError: no program can be run on this machine.
    """
    limits = limits or Limits()
    with tempfile.TemporaryFile() as source:
        source.write(program.encode(errors="surrogatepass") if isinstance(program, str) else program)
        source.seek(0)
        supervised = _Supervised(source, names, limits)
    try:
        ended = supervised.follow()
    finally:
        supervised.end()
    return supervised.outcome(ended)


@dataclass
class _Pipe:
    """What has been read from one pipe, up to a limit."""

    file: int
    most: int
    data: bytearray = field(default_factory=bytearray)

    def read(self) -> bool:
        """Read what is there; False at the end."""
        try:
            new = os.read(self.file, 2**16)
        except BlockingIOError:
            return True
        self.data += new
        return bool(new)

    @property
    def is_over(self) -> bool:
        return len(self.data) > self.most


class _Supervised:
    """One run: the supervisor's process and the pipes from it and from the program."""

    def __init__(self, source: Any, names: Sequence[str], limits: Limits) -> None:
        self.limits, self.mark = limits, uuid.uuid4().hex
        ends = {name: os.pipe() for name in ("result", "output", "status", "lifeline")}
        theirs = {name: ends[name][1] for name in ("result", "status")} | {"lifeline": ends["lifeline"][0]}
        settings = json.dumps({**asdict(limits), **theirs, "names": list(names)})
        try:
            self.popen = subprocess.Popen(
                [sys.executable, "-s", "-P", "-B", "-m", _JAIL, settings],
                stdin=source,
                stdout=ends["output"][1],
                stderr=ends["output"][1],
                pass_fds=list(theirs.values()),
                env=_environment(self.mark),
                start_new_session=True,  # Ctrl-C is for the parent; when that ends, so does the lifeline
            )
        finally:
            for file in (*theirs.values(), ends["output"][1]):
                os.close(file)
        self.result = _Pipe(ends["result"][0], limits.result_bytes)
        self.output = _Pipe(ends["output"][0], limits.output_bytes)
        self.status = _Pipe(ends["status"][0], 2**16)
        self.lifeline = ends["lifeline"][1]
        self.began: float | None = None
        for pipe in self._pipes():
            os.set_blocking(pipe.file, False)

    def _pipes(self) -> tuple[_Pipe, ...]:
        return (self.result, self.output, self.status)

    def follow(self) -> str:
        """Read until the supervisor has ended or a limit is broken; says which."""
        deadline = time.monotonic() + _START_SECONDS
        with selectors.DefaultSelector() as selector:
            for pipe in self._pipes():
                selector.register(pipe.file, selectors.EVENT_READ, pipe)
            while True:
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    if not key.data.read():
                        selector.unregister(key.fd)
                        if key.data is self.status:
                            return "ended"
                if self.began is None and self.status.data:
                    self.began = time.monotonic()
                    deadline = self.began + self.limits.seconds
                if self.output.is_over or self.result.is_over:
                    return "output" if self.output.is_over else "result"
                if time.monotonic() >= deadline:
                    return "timeout"

    def end(self) -> None:
        """Have everything killed, and read what is still in the pipes."""
        self.seconds = time.monotonic() - self.began if self.began else 0.0
        os.close(self.lifeline)
        try:
            self.popen.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        for pipe in self._pipes():
            while not pipe.is_over and _has_more(pipe):
                pass
            os.close(pipe.file)
        if "processes" not in self._isolation():
            _kill_marked(self.mark)

    def _said(self) -> dict[str, Any]:
        said: dict[str, Any] = {}
        for line in bytes(self.status.data).splitlines():
            with contextlib.suppress(ValueError, TypeError):
                said = {**json.loads(line), **said}  # the first word, from before the program ran, counts
        return said

    def _isolation(self) -> tuple[str, ...]:
        return tuple(name for name in ISOLATION if name in self._said().get("isolation", ()))

    def outcome(self, ended: str) -> ProgramOutcome:
        """What became of the program."""
        output = bytes(self.output.data).decode(errors="replace")
        if self.began is None or "isolation" not in self._said():
            raise SandboxError(f"the sandbox did not start. It wrote:\n{output[-_SHOWN:]}")
        rest = (output[:_SHOWN], round(self.seconds, 3), self._isolation())
        if ended == "timeout":
            return ProgramFailure("timeout", f"it did not end within {self.limits.seconds:g} s", *rest)
        if ended == "output" or self.output.is_over:
            return ProgramFailure("output", f"it printed more than {self.limits.output_bytes} bytes", *rest)
        if ended == "result" or self.result.is_over:
            return ProgramFailure("result", f"the result takes more than {self.limits.result_bytes} bytes", *rest)
        if self._said().get("over_memory") is True:
            return ProgramFailure(
                "memory", f"its processes need more than {self.limits.memory_mb} MiB of memory", *rest
            )
        reply = _reply(bytes(self.result.data))
        if reply is None:
            return ProgramFailure("crash", _how_it_ended(self._said().get("status"), bool(self.result.data)), *rest)
        if "values" in reply:
            return ProgramResult(reply["values"], *rest)
        if reply["error"] == "memory":
            return ProgramFailure("memory", f"it needs more than {self.limits.memory_mb} MiB of memory", *rest)
        return ProgramFailure(
            "result" if reply["error"] == "result" else "error", str(reply.get("detail"))[:_SHOWN], *rest
        )


def _has_more(pipe: _Pipe) -> bool:
    before = len(pipe.data)
    return pipe.read() and len(pipe.data) > before


def _reply(data: bytes) -> dict[str, Any] | None:
    """The one JSON object that a program's process sends; None if it is anything else, for the program may send it."""
    try:
        reply = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(reply, dict) or not (isinstance(reply.get("values"), dict) or "error" in reply):
        return None
    return reply


def _environment(mark: str) -> dict[str, str]:
    """Nothing secret, one thread, and the same order of sets every time."""
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    python = {"PYTHONPATH": str(_IMPORTS), "PYTHONHASHSEED": "0"}
    return kept | threads | python | {"PATH": os.defpath, "LANG": "C.UTF-8", _MARK: mark}


def _how_it_ended(status: Any, has_sent: bool) -> str:
    if has_sent:
        return "its process sent something that is no result"
    if not isinstance(status, int):
        return "its process was killed"
    try:
        code = os.waitstatus_to_exitcode(status)
    except (ValueError, OverflowError):
        return "its process was killed"
    how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
    return f"its process {how} before its globals could be read"


def _kill_marked(mark: str) -> None:
    """Without a process namespace: kill what has got away from the supervisor, by the mark in its environment."""
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(_MARK) == mark:
                process.kill()


__getattr__ = earlier_names_in(globals())
