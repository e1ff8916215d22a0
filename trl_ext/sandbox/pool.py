"""Sandboxes without the start of a Python: supervisors are forked from one process that has imported everything."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import IO, Any

from trl_ext.sandbox import Supervisor, run_blocks, run_program, supervisor_command, supervisor_environment
from trl_ext.sandbox.limits import ISOLATION, Limits, ProgramOutcome, SandboxError
from trl_ext.sandbox.supervisor import PASSED, SERVE


class SandboxPool:
    """Runs programs as `run_program` does, in a fraction of its time. Thread-safe: threads run theirs at once.

    What escaped a sandbox could not be told from what is in another one, so programs have to be isolated from other
    processes, the network and files, which needs Linux and namespaces.

    Args:
        limits: of each program.

    Raises:
        SandboxError: programs cannot be isolated on this machine; says from what.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        in_force = run_program("", [], limits).isolation
        if missing := [name for name in ISOLATION if name not in in_force]:
            raise SandboxError(f"programs cannot be isolated on this machine: not in force: {', '.join(missing)}")
        self._lock = threading.Lock()
        self._server: _Server | None = None

    def __enter__(self) -> SandboxPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process that forks. Another program would start a new one."""
        with self._lock:
            if self._server is not None:
                self._server.close()
            self._server = None

    def run_blocks(self, blocks: Sequence[str]) -> ProgramOutcome:
        """See `trl_ext.sandbox.run_blocks`."""
        return run_blocks(blocks, self.limits, self._fork)

    def _fork(
        self, source: IO[bytes], output: int, files: Mapping[str, int], settings: Mapping[str, Any], mark: str
    ) -> Supervisor:
        passed = {"source": source.fileno(), "output": output, **files}
        request = json.dumps(settings).encode(), [passed[name] for name in PASSED]
        with self._lock:
            for is_last in (False, True):
                server = self._server = self._server or _Server()
                try:
                    return server.fork(*request)
                except OSError as error:  # somebody has killed it
                    server.close()
                    self._server = None
                    if is_last:
                        raise SandboxError(f"the process that sandboxes are forked from has ended: {error}") from error
        raise AssertionError("never reached")


class _Server:
    """The process that forks, and the socket over which it is asked to."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.popen = subprocess.Popen(
                [*supervisor_command(), SERVE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=supervisor_environment(),
                start_new_session=True,
            )
        self.socket = ours
        self._end = weakref.finalize(self, _end, self.popen, ours, self.owner)

    def fork(self, settings: bytes, files: list[int]) -> Supervisor:
        """A supervisor with these settings and the files `PASSED`.

        Raises:
            OSError: the process has ended, or belongs to the process that this one was forked from.
        """
        if self.owner != os.getpid():
            raise OSError("it is another process's")
        socket.send_fds(self.socket, [settings], files)
        answer = self.socket.recv(8)
        if len(answer) < 8:
            raise OSError("no answer")
        return _Forked(int.from_bytes(answer, "little"))

    def close(self) -> None:
        """End the process."""
        self._end()


def _end(popen: subprocess.Popen[bytes], ours: socket.socket, owner: int) -> None:
    ours.close()
    if owner == os.getpid():
        popen.kill()
        popen.wait()
    else:
        popen.returncode = 0  # else Popen warns that it is still running


class _Forked:
    """A supervisor that another process has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self.file: int | None = os.pidfd_open(pid)
        except OSError:  # it has ended
            self.file = None

    def ends_within(self, seconds: float) -> bool:
        """Wait so long for its end; whether it has come."""
        if self.file is None:
            return True
        has_ended = bool(select.select([self.file], [], [], seconds)[0])
        if has_ended:
            os.close(self.file)
            self.file = None
        return has_ended

    def kill(self) -> None:
        """End it at once."""
        if self.file is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.file, signal.SIGKILL)
            self.ends_within(1.0)
