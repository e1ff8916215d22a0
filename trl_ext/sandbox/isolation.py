"""What a program's process gives up before the program runs: namespaces, rights, resources. Mostly for Linux.

Each step is best effort, because systems differ in what they allow; `probe` then tests what is in force.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct
import sys
from typing import Any

_NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x8000000, 0x10000000, 0x20000000, 0x40000000
_NEW_ANYTHING = 0x7E020000
_LIBC = ctypes.CDLL(None, use_errno=True)

# System calls, by number on x86-64 and on ARM, that give rights, or memory that `memory` cannot count.
_FORBIDDEN = {
    "unshare": (272, 97), "setns": (308, 268), "open_by_handle_at": (304, 265), "mount": (165, 40),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "memfd_secret": (447, 447),
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
}  # fmt: skip
_CLONE, _CLONE3, _PRCTL, _SOCKET = (56, 220), (435, 435), (157, 167), (41, 198)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # which of the numbers, and seccomp's name for it


def become_subreaper() -> None:
    """Become the parent of orphaned descendants, to be able to kill them."""
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def set_nondumpable() -> None:
    """Hide this process's memory and environment from other processes of the same user."""
    _prctl(4, 0)  # PR_SET_DUMPABLE


def enter_namespaces() -> bool:
    """Enter namespaces of processes, network and, where needed, users from the next fork on; whether that worked.

    A forked process tries first, because a process cannot leave a user namespace in which it may not map its user.
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


def close_inherited_fds(*files: int) -> None:
    """Close all file descriptors but `files` and standard output and error; standard input becomes empty."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    first, last = sorted(files)
    os.closerange(3, first)
    os.closerange(first + 1, last)
    os.closerange(last + 1, 1024)


def choose_uid(number: int) -> int:
    """The user to run as. Limits on processes do not bind root, so root becomes another user.

    `number` selects one of the 478 ids that systemd's ranges leave unused: programs of the same user could kill each
    other, and would share the limit on processes.
    """
    if os.getuid() != 0:
        return os.getuid()
    user = 60706 + number % 478
    try:
        os.seteuid(user)
        os.seteuid(0)
    except OSError:  # a container with a single user
        return 0
    return user


# Rights and resources.


def drop_privileges(user: int) -> None:
    """Become that user, permanently without capabilities and without a way to gain any."""
    if sys.platform != "linux":
        return
    _drop_capabilities(user)
    _prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
    forbid_calls()


def _drop_capabilities(user: int) -> None:
    for number in range(64):
        _prctl(24, number)  # PR_CAPBSET_DROP
    if user != os.getuid():
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    _prctl(47, 4)  # PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _LIBC.capset(header, (ctypes.c_uint32 * 6)())


def forbid_calls() -> None:
    """A seccomp filter that denies `_FORBIDDEN`, new namespaces, unusual sockets, and hiding from the memory count."""
    which, machine = _MACHINES.get(os.uname().machine, (None, None))
    if which is None:
        return
    allow, deny, unknown = ((6, 0, 0, value) for value in (0x7FFF0000, 0x50001, 0x50026))  # EPERM, ENOSYS
    load_argument = (0x20, 0, 0, 16)
    filters = [(0x20, 0, 0, 4), (0x15, 1, 0, machine), deny]  # calls of another architecture, such as 32-bit ones
    filters += [(0x20, 0, 0, 0), (0x35, 0, 1, 0x40000000), deny]  # x32
    for numbers in _FORBIDDEN.values():
        filters += [(0x15, 0, 1, numbers[which]), deny]
    filters += [(0x15, 0, 1, _CLONE3[which]), unknown]  # its flags are in memory; the C library then uses `clone`
    filters += [(0x15, 0, 4, _CLONE[which]), load_argument, (0x45, 0, 1, _NEW_ANYTHING), deny, allow]
    filters += [(0x15, 0, 4, _PRCTL[which]), load_argument, (0x15, 0, 1, 4), deny, allow]  # PR_SET_DUMPABLE
    filters += [(0x15, 0, 6, _SOCKET[which]), load_argument]  # only three families: vsock reaches a virtual machine's
    filters += [(0x15, 3, 0, 1), (0x15, 2, 0, 2), (0x15, 1, 0, 10), deny, allow]  # host from every namespace
    filters.append(allow)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in filters))
    program = ctypes.create_string_buffer(struct.pack("HP", len(filters), ctypes.addressof(code)))
    _LIBC.prctl(22, 2, program, 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        _LIBC.prctl(option, value, 0, 0, 0)


def set_limits(settings: dict[str, Any]) -> None:
    """Set the kernel's limits on this process and on those that it starts."""
    seconds = int(settings["seconds"]) + 2  # CPU time; the supervisor limits wall-clock time
    for name, value in (
        ("CORE", 0), ("NOFILE", 256), ("CPU", seconds), ("FSIZE", settings["file_bytes"]),
        ("NPROC", settings["processes"]), ("AS", settings["memory_mb"] * 2**20),
    ):  # fmt: skip
        which = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS has no limit on address space
            resource.setrlimit(which, (value, value))
