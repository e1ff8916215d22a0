"""What the process of a program gives up before it runs: namespaces, files, rights, resources. Linux, mostly.

Each step is best effort, because systems differ in what they allow; what was achieved is reported, not assumed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from typing import Any

_HIDDEN = ("/run", "/tmp", "/var/tmp", "/dev/shm")  # a socket can be used on a read-only file system, too
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_READ_ANY_FILE = 1 << 2  # CAP_DAC_READ_SEARCH
_LIBC = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of what descendants leave behind (PR_SET_CHILD_SUBREAPER), to be able to kill it."""
    if sys.platform == "linux":
        _prctl(36, 1)


def hide_memory() -> None:
    """Keep what this process and its environment hold from other processes of the same user (PR_SET_DUMPABLE)."""
    if sys.platform == "linux":
        _prctl(4, 0)


def own_namespaces() -> bool:
    """Processes, network and, where that takes one, users of its own, from the next fork on; whether it got them.

    A copy tries first: where a system gives the namespaces, but not the right to name users in them, nobody gets back.
    """
    if sys.platform != "linux":
        return False
    copy = os.fork()
    if copy == 0:
        try:
            _unshare()
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitpid(copy, 0)[1] != 0:
        return False
    _unshare()
    return True


def _unshare() -> None:
    uid, gid, spaces = os.getuid(), os.getgid(), _NEWPID | _NEWNET | _NEWIPC
    if _LIBC.unshare(spaces) == 0:
        return
    if _LIBC.unshare(spaces | _NEWUSER) != 0:
        raise OSError("no namespaces")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def keep_open_only(*files: int) -> None:
    """Nothing to read on standard input, and no pipe of the supervisor's."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    first, last = sorted(files)
    os.closerange(3, first)
    os.closerange(first + 1, last)
    os.closerange(last + 1, 1024)


def whom_to_be(number: int) -> tuple[int, int]:
    """The user, and capabilities to keep. Limits on processes do not bind root, so root becomes another user.

    It is one of the 478 that systemd's list of ranges leaves to nobody, by `number`: programs of one user could kill
    each other, and share the limit on processes.

    A Python in root's home stays readable by a capability; otherwise the program keeps none.
    """
    if os.getuid() != 0:
        return os.getuid(), 0
    user = 60706 + number % 478
    try:
        os.seteuid(user)
    except OSError:  # a container that knows one user only
        return 0, 0
    try:
        for path in (os.__file__, sys.executable, *sys.path):
            if not path.endswith(".zip"):
                os.stat(path)
        return user, 0
    except OSError:
        return user, _READ_ANY_FILE
    finally:
        os.seteuid(0)


def own_files(folder: str, user: int) -> list[str]:
    """What it got of "processes", a /proc without others, and "files", read-only but for a small new one at `folder`.

    What `_HIDDEN` has is gone. Sockets that a service has elsewhere, such as in the home directory, can still be used.
    """
    if _LIBC.unshare(_NEWNS) != 0 or not _mount("none", "/", None, 0x44000):  # MS_REC | MS_PRIVATE
        return []
    got = ["processes"] if _mount("proc", "/proc", "proc", 0xE) else []
    read_only = (ctypes.c_uint64 * 4)(1, 0, 0, 0)  # struct mount_attr with MOUNT_ATTR_RDONLY
    if _LIBC.syscall(442, -100, b"/", 0x8000, read_only, 32) != 0:  # mount_setattr, AT_FDCWD, AT_RECURSIVE
        return got
    if not all(_hide(place, folder) for place in _HIDDEN if _can_go(place)):
        return got
    group = user if user != os.getuid() else os.getgid()
    if _mount("tmpfs", folder, "tmpfs", 0x6, f"size=64m,mode=700,uid={user},gid={group}"):
        got.append("files")
    return got


def _can_go(place: str) -> bool:
    """Whether it is there and Python can do without it."""
    needed = [os.path.realpath(path) for path in (os.__file__, sys.executable, sys.prefix, *sys.path)]
    return os.path.isdir(place) and not any(f"{path}/".startswith(f"{place}/") for path in needed)


def _hide(place: str, folder: str) -> bool:
    """Put an empty, read-only file system there, with nothing in it but the way to `folder`."""
    if not _mount("tmpfs", place, "tmpfs", 0x6, "size=1m,mode=755"):
        return False
    if folder.startswith(f"{place}/"):
        os.makedirs(folder)
    return _mount("none", place, None, 0x1027)  # MS_REMOUNT | MS_BIND, and read-only


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> bool:
    return _LIBC.mount(source.encode(), target.encode(), kind and kind.encode(), flags, options.encode()) == 0


def become(user: int, capabilities: int) -> None:
    """Be that user with those capabilities, for good."""
    if sys.platform != "linux":
        return
    _prctl(8, 1)  # PR_SET_KEEPCAPS
    if user != os.getuid():
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _LIBC.capset(header, (ctypes.c_uint32 * 6)(capabilities, capabilities, 0, 0, 0, 0))
    _prctl(38, 1)  # PR_SET_NO_NEW_PRIVS


def _prctl(option: int, value: int) -> None:
    _LIBC.prctl(option, value, 0, 0, 0)


def set_limits(settings: dict[str, Any]) -> None:
    """The kernel's limits on this process and on those that it starts."""
    seconds = int(settings["seconds"]) + 2  # of CPU; the supervisor's is the wall-clock
    for name, value in (
        ("CORE", 0), ("NOFILE", 256), ("CPU", seconds), ("FSIZE", settings["file_bytes"]),
        ("NPROC", settings["processes"]), ("AS", settings["memory_mb"] * 2**20),
    ):  # fmt: skip
        which = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS has no limit on address space
            resource.setrlimit(which, (value, value))
