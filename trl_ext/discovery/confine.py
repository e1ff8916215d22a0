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

_NOBODY = 65534
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_READ_ANY_FILE = 1 << 2  # CAP_DAC_READ_SEARCH
_LIBC = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of what descendants leave behind (PR_SET_CHILD_SUBREAPER), to be able to kill it."""
    if sys.platform == "linux":
        _prctl(36, 1)


def own_namespaces() -> list[str]:
    """Processes, network and, where that takes one, users of its own, from the next fork on; what it got."""
    if sys.platform != "linux":
        return []
    uid, gid, spaces = os.getuid(), os.getgid(), _NEWPID | _NEWNET | _NEWIPC
    if _LIBC.unshare(spaces) != 0:
        if _LIBC.unshare(spaces | _NEWUSER) != 0:
            return []
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    return ["processes", "network"]


def keep_open_only(*files: int) -> None:
    """Nothing to read on standard input, and no pipe of the supervisor's."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    first, last = sorted(files)
    os.closerange(3, first)
    os.closerange(first + 1, last)
    os.closerange(last + 1, 1024)


def whom_to_be() -> tuple[int, int]:
    """The user, and capabilities to keep. Limits on processes do not bind root, so root becomes nobody.

    A Python in root's home stays readable by a capability; otherwise the program keeps none.
    """
    if os.getuid() != 0:
        return os.getuid(), 0
    try:
        os.seteuid(_NOBODY)
    except OSError:  # a container that knows one user only
        return 0, 0
    try:
        for path in (os.__file__, sys.executable, *sys.path[1:]):
            if not path.endswith(".zip"):
                os.stat(path)
        return _NOBODY, 0
    except OSError:
        return _NOBODY, _READ_ANY_FILE
    finally:
        os.seteuid(0)


def read_only_files(folder: str, user: int) -> bool:
    """All files read-only, except a new, empty, small file system at `folder`; no sockets of services; own /proc."""
    if _LIBC.unshare(_NEWNS) != 0 or _mount("none", "/", None, 0x44000) != 0:  # MS_REC | MS_PRIVATE
        return False
    read_only = (ctypes.c_uint64 * 4)(1, 0, 0, 0)  # struct mount_attr with MOUNT_ATTR_RDONLY
    if _LIBC.syscall(442, -100, b"/", 0x8000, read_only, 32) != 0:  # mount_setattr, AT_FDCWD, AT_RECURSIVE
        return False
    _mount("tmpfs", "/run", "tmpfs", 0x7)  # read-only; a socket in it can be used on a read-only file system
    _mount("proc", "/proc", "proc", 0xE)
    group = user if user == _NOBODY else os.getgid()
    return _mount("tmpfs", folder, "tmpfs", 0x6, f"size=64m,mode=700,uid={user},gid={group}") == 0


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> int:
    return _LIBC.mount(source.encode(), target.encode(), kind and kind.encode(), flags, options.encode())


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
