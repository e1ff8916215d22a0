"""Which parts of a program's isolation are in force, tested by its own process just before the program runs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import stat

from trl_ext.sandbox.filesystem import DEVICES, needed_paths

_NEWUSER, _VSOCK = 0x10000000, 40
_ADDRESSES = ("127.0.0.1", "192.0.2.1", "::1", "2001:db8::1")  # this machine, and addresses reserved for documentation


def verified(folder: str) -> list[str]:
    """The members of `limits.ISOLATION` that are in force for this process, whose own folder is `folder`."""
    names = []
    for name, is_in_force in _PROBES.items():
        with contextlib.suppress(OSError, ValueError, KeyError):  # such as where there is no /proc
            if is_in_force(folder):
                names.append(name)
    return names


def _processes(_: str) -> bool:
    """Whether it sees only itself."""
    return [name for name in os.listdir("/proc") if name.isdigit()] == ["1"] and os.getpid() == 1


def _network(_: str) -> bool:
    """Whether no address is reachable, not even this machine's or a virtual machine's host. Sends nothing."""
    families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in _ADDRESSES]
    targets = zip((*families, _VSOCK), (*_ADDRESSES, None), strict=True)
    return not any(_can_reach(family, address) for family, address in targets)


def _can_reach(family: int, address: str | None) -> bool:
    """Whether sockets of that family exist, and the address, if given, has a route."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM if address else socket.SOCK_STREAM) as opened:
            if address:
                opened.connect((address, 9))
    except OSError:
        return False
    return True


def _files(folder: str) -> bool:
    """Whether nothing is mounted but what is needed, all but its folder read-only, and devices are harmless."""
    with open("/proc/self/mountinfo", errors="surrogateescape") as file:
        mounts = [re.match(r"\S+ \S+ \S+ \S+ (\S+) (\S+) .*?- (\S+)", line) for line in file]
    seen = [(_plain(mount[1]), mount[2].split(","), mount[3]) for mount in mounts if mount]  # the latest counts
    options, kinds = {path: given for path, given, _ in seen}, {path: kind for path, _, kind in seen}
    writable = {path for path, given, _ in seen if "ro" not in given}
    needed = [os.path.realpath(path) for path in needed_paths()]
    known = (*needed, "/proc")
    needless = [path for path in options if not any(f"{path}/".startswith(f"{place}/") for place in known)]
    devices = [os.stat(f"/dev/{name}") for name in os.listdir("/dev")]
    return (
        len(seen) == len(mounts)
        and writable == {folder}
        and "rw" in options[folder]
        and set(needless) <= {"/", folder}
        and kinds["/"] == kinds[folder] == "tmpfs"
        and sorted(os.listdir("/dev")) == sorted(DEVICES)
        and all(stat.S_ISCHR(device.st_mode) and os.major(device.st_rdev) == 1 for device in devices)
    )


def _plain(path: str) -> str:
    """A path of mountinfo, where spaces and similar characters are octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _rights(_: str) -> bool:
    """Whether it has no capabilities, cannot gain any by execution, and a filter denies new user namespaces."""
    with open("/proc/self/status") as file:
        fields = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    sets = [int(fields[f"Cap{name}"], 16) for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")]
    return not any(sets) and fields["NoNewPrivs"] == "1" and fields["Seccomp"] == "2" and not _can_have_users()


def _can_have_users() -> bool:
    copy = os.fork()
    if copy == 0:
        os._exit(ctypes.CDLL(None).unshare(_NEWUSER) == 0)
    return os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) != 0


_PROBES = {"processes": _processes, "network": _network, "files": _files, "rights": _rights}
