"""What of a program's isolation is in force, found out by its process itself, just before the program runs."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import stat
from collections.abc import Callable

from trl_ext.discovery.sandbox.isolation import DEVICES, hidden_places

_NEWUSER, _VSOCK = 0x10000000, 40
_ADDRESSES = ("127.0.0.1", "192.0.2.1", "::1", "2001:db8::1")  # here, and reserved for documents


def verified(folder: str) -> list[str]:
    """Of `outcome.ISOLATION` what is in force for this process, whose own folder is `folder`."""
    return [name for name, is_in_force in _PROBES.items() if _holds(is_in_force, folder)]


def _holds(is_in_force: Callable[[str], bool], folder: str) -> bool:
    try:
        return is_in_force(folder)
    except (OSError, ValueError, KeyError):  # no /proc, for one
        return False


def _processes(_: str) -> bool:
    """It is the only one."""
    return [name for name in os.listdir("/proc") if name.isdigit()] == ["1"] and os.getpid() == 1


def _network(_: str) -> bool:
    """No way to any address, not even to its own machine's, nor to a virtual machine's host. Nothing is sent."""
    families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in _ADDRESSES]
    ways = zip((*families, _VSOCK), (*_ADDRESSES, None), strict=True)
    return not any(_has_way(family, address) for family, address in ways)


def _has_way(family: int, address: str | None) -> bool:
    """Whether there are sockets of that family, and if there is an address, a way to it."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM if address else socket.SOCK_STREAM) as found:
            if address:
                found.connect((address, 9))
    except OSError:
        return False
    return True


def _files(folder: str) -> bool:
    """Everything but its folder is read-only, the places to hide are file systems of its own, devices are harmless."""
    with open("/proc/self/mountinfo", errors="surrogateescape") as file:
        mounts = [re.match(r"\S+ \S+ \S+ \S+ (\S+) (\S+) .*?- (\S+)", line) for line in file]
    seen = [(_plain(mount[1]), mount[2].split(","), mount[3]) for mount in mounts if mount]  # the latest counts
    options, kinds = {path: given for path, given, _ in seen}, {path: kind for path, _, kind in seen}
    writable = {path for path, given, _ in seen if "ro" not in given}
    devices = [os.stat(f"/dev/{name}") for name in os.listdir("/dev")]
    return (
        len(seen) == len(mounts)
        and writable == {folder}
        and "rw" in options[folder]
        and all(kinds.get(place) == "tmpfs" for place in (folder, *hidden_places()))
        and sorted(os.listdir("/dev")) == sorted(DEVICES)
        and all(stat.S_ISCHR(device.st_mode) and os.major(device.st_rdev) == 1 for device in devices)
    )


def _plain(path: str) -> str:
    """A path of mountinfo, where spaces and the like are octal."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _rights(_: str) -> bool:
    """No capabilities in any set, none to come by execution, a filter on calls, and no new user namespace."""
    with open("/proc/self/status") as file:
        fields = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    sets = [int(fields[f"Cap{name}"], 16) for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")]
    return not any(sets) and fields["NoNewPrivs"] == "1" and fields["Seccomp"] == "2" and not _can_have_users()


def _can_have_users() -> bool:
    copy = os.fork()
    if copy == 0:
        os._exit(ctypes.CDLL(None).unshare(_NEWUSER) == 0)
    return os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) != 0


_PROBES: dict[str, Callable[[str], bool]] = {
    "processes": _processes,
    "network": _network,
    "files": _files,
    "rights": _rights,
}
