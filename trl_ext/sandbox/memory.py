"""The memory that several processes use together, from Linux's /proc."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

_SHARED = ("/memfd:", "/dev/zero", "/dev/shm/", "/SYSV")  # names of memory maps without a file on disk


def memory_of(pids: list[int]) -> int:
    """Bytes of these processes' private memory, and of memory that they share or hold as files, counted once each.

    Maps count in full, touched or not. Data in sockets is not counted; it is bounded by the limits on open files and on
    their size.
    """
    private, shared = 0, dict[str, int]()
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/{pid}/status", errors="replace") as file:
                private += sum(1024 * int(held) for held in re.findall(r"^RssAnon:\s+(\d+) kB$", file.read(), re.M))
            for name, size in (*_open_files(pid), *_maps(pid)):
                shared[name] = max(shared.get(name, 0), size)
    return private + sum(shared.values())


def _open_files(pid: int) -> Iterator[tuple[str, int]]:
    """Name and size of each open file in memory; every thread is read because it may have its own file table."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        folder = f"/proc/{pid}/task/{thread}/fd"
        with contextlib.suppress(OSError):
            for number in os.listdir(folder):
                with contextlib.suppress(OSError):
                    if os.readlink(f"{folder}/{number}").startswith(_SHARED):
                        status = os.stat(f"{folder}/{number}")
                        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
                        yield f"{device} {status.st_ino}", 512 * status.st_blocks


def _maps(pid: int) -> Iterator[tuple[str, int]]:
    """Name and total size of the maps of each such file."""
    sizes = dict[str, int]()
    with open(f"/proc/{pid}/maps", errors="replace") as file:
        for line in file:
            span, _, _, device, inode, *path = line.split(maxsplit=5)
            if path and path[0].startswith(_SHARED):
                start, end = (int(address, 16) for address in span.split("-"))
                name = f"{device} {inode}"
                sizes[name] = sizes.get(name, 0) + end - start
    yield from sizes.items()
