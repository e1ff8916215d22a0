"""Supervises an untrusted program. `run_program` starts it as `python -m`, a `SandboxPool` one that forks others.

There are two processes: the supervisor, which the program cannot reach, and its child, which gives up its rights and
runs the program. When the lifeline closes or the child ends, the supervisor kills everything the program started. It
must work in any Python, so it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import time
import traceback
from typing import Any, NoReturn

from trl_ext.sandbox import filesystem, isolation
from trl_ext.sandbox.child import run, run_blocks, tell
from trl_ext.sandbox.memory import memory_of
from trl_ext.sandbox.probe import verified

SERVE = "serve"
PASSED = ("source", "output", "result", "status", "lifeline")  # files of a request
_MEMORY_INTERVAL = 0.25  # seconds between two checks of all processes' memory; the kernel limits each of them


def main() -> None:
    """Supervise one program: settings in the first argument, the program on standard input; or `serve` a pool."""
    if sys.argv[1] == SERVE:
        serve(socket.socket(fileno=int(sys.argv[2])))
    else:
        supervise(json.loads(sys.argv[1]), sys.stdin.buffer.read())


def serve(requests: socket.socket) -> None:
    """Fork a supervisor for each request of a `SandboxPool`, and answer with its process id, until the pool is gone.

    A request has the settings, and the files `PASSED` in this order.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    filesystem.needed_paths()  # once for all of them
    while True:
        data, files, _, _ = socket.recv_fds(requests, 2**16, len(PASSED))
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            _supervise_forked(requests, json.loads(data), dict(zip(PASSED, files, strict=True)))
        for file in files:
            os.close(file)
        requests.sendall(pid.to_bytes(8, "little"))


def _supervise_forked(requests: socket.socket, settings: dict[str, Any], files: dict[str, int]) -> NoReturn:
    try:
        requests.close()
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(files["output"], 1)
        os.dup2(files["output"], 2)
        os.close(files["output"])
        with os.fdopen(files["source"], "rb") as source:
            program = source.read()
        supervise({**settings, **files}, program)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def supervise(settings: dict[str, Any], program: bytes) -> None:
    """Run one program in a child, and tell how it ended when nothing of it is left."""
    folder = os.path.realpath(tempfile.mkdtemp(prefix="trl_ext_sandbox_"))
    try:
        is_isolated = settings["namespaces"] and isolation.enter_namespaces()
        settings["number"] = os.getpid()
        isolation.become_subreaper()
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        child = os.fork()
        if child == 0:
            _run_in_child(settings, program, folder, is_isolated)
        os.close(settings["result"])
        status, is_over = _wait(child, settings["lifeline"], woken, settings["memory_mb"] * 2**20)
        _kill_descendants()
        tell(settings["status"], {"status": status, "over_memory": is_over})
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(child: int, lifeline: int, woken: int, memory: int) -> tuple[int, bool]:
    """The child's wait status, and whether it was killed because all processes together took too much memory."""
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    poll.register(woken, select.POLLIN)
    due = time.monotonic()
    while True:
        ready = {fd for fd, _ in poll.poll(1000 * _MEMORY_INTERVAL)}
        if woken in ready:
            os.read(woken, 512)
        is_over = False
        if time.monotonic() >= due:  # by the clock: many ending children keep the poll from timing out
            is_over, due = memory_of(_descendants()) > memory, time.monotonic() + _MEMORY_INTERVAL
        is_to_end = lifeline in ready or is_over
        if is_to_end:
            os.kill(child, signal.SIGKILL)
        pid, status = os.waitpid(child, 0 if is_to_end else os.WNOHANG)
        if pid:
            return status, is_over


def _kill_descendants() -> None:
    """Kill all descendants until none is left. In a process namespace the kernel has already done so."""
    while True:
        for pid in _descendants():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            select.select([], [], [], 0.002)
        except ChildProcessError:
            return


def _descendants() -> list[int]:
    """The processes below this one, from /proc; none where there is no /proc. Needs the standard library only."""
    parents = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{int(name)}/stat", "rb") as file:
            parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    tree, grew = {os.getpid()}, True
    while grew:
        below = {pid for pid, parent in parents.items() if parent in tree}
        grew = not below <= tree
        tree |= below
    return sorted(tree - {os.getpid()})


def _run_in_child(settings: dict[str, Any], program: bytes, folder: str, is_isolated: bool) -> NoReturn:
    """Give up rights, run the program and report its outcome. Never returns."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        isolation.close_inherited_fds(settings["status"], settings["result"])
        os.umask(0o022)
        ours = os.environ.pop("PYTHONPATH")  # programs may not import from there, such as others' results
        own = {os.path.realpath(sysconfig.get_paths()[name]) for name in ("purelib", "platlib")}
        removed = {os.path.realpath(ours)} - own  # installed, it is where NumPy is, too
        sys.path[:] = [path for path in sys.path if os.path.realpath(path) not in removed]
        user = isolation.choose_uid(settings["number"])
        with contextlib.suppress(OSError):
            filesystem.isolate_filesystem(folder, user) if is_isolated else filesystem.show_python(folder, user)
        filesystem.check_python(user)
        if user != os.getuid():
            os.chown(folder, user, user)
        os.chdir(folder)
        isolation.drop_privileges(user)
        tell(settings["status"], {"isolation": verified(folder)})
        isolation.set_limits(settings)
        os.close(settings["status"])
        if settings.get("blocks"):
            run_blocks(program, settings["result"])
        run(program, settings["names"], settings["result"])
    except BaseException:  # in the set-up; `run` handles the program's own
        traceback.print_exc()
    finally:
        os._exit(70)


if __name__ == "__main__":
    main()
