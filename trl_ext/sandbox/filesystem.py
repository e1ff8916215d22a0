"""The files that a program sees: a root of its own, in which nothing is but what its interpreter needs, and a folder.

Only Linux has such roots; elsewhere `OSError` is raised and `probe` reports that nothing is in force.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import os
import sys
import sysconfig

DEVICES = ("null", "random", "urandom", "zero")
_SYSTEMS = ("/", "/usr", "/usr/local")  # prefixes of a Python that shares its folders with everything else
_OF_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_DATA = ("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo", "/usr/lib/locale")
_NEWNS, _DETACH, _BIND = 0x20000, 2, 0x5000  # MS_BIND | MS_REC
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_LIBC = ctypes.CDLL(None, use_errno=True)


def isolate_filesystem(folder: str, user: int) -> None:
    """Make a new root with `needed_paths` and a new /proc, all of it read-only, except a new, small `folder`."""
    _enter_new_root(folder, has_own_proc=True)
    _read_only()
    group = user if user != os.getuid() else os.getgid()
    mount("tmpfs", folder, "tmpfs", 0x6, f"size=64m,mode=700,uid={user},gid={group}")


def show_python(folder: str, user: int) -> None:
    """Where Python is in a place that this user cannot read, such as root's home, make a root in which it can."""
    if _unreadable(user):
        _enter_new_root(folder, has_own_proc=False)
        os.chmod(folder, 0o700)


@functools.cache
def needed_paths() -> tuple[str, ...]:
    """What is visible of the machine: Python with its packages, the libraries that it loads, time zones, devices."""
    devices = [f"/dev/{name}" for name in DEVICES]
    paths = {os.path.abspath(path) for path in (*_pythons_folders(), *_libraries(), *_DATA, *devices)}
    return tuple(sorted(path for path in paths if os.path.exists(path)))


def _pythons_folders() -> set[str]:
    """Where Python has its programs, its library, and its packages; all of a prefix that is Python's alone."""
    names = sysconfig.get_paths()
    paths = {names[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {os.path.dirname(os.__file__)}
    for prefix in {sys.prefix, sys.base_prefix, sys.exec_prefix} - set(_SYSTEMS):
        paths |= {os.path.join(prefix, part) for part in ("bin", "lib", "lib64", "pyvenv.cfg")}
    paths |= {path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")}
    paths |= {sys.executable, os.path.realpath(sys.executable)}
    return {path for path in paths if os.path.exists(path)}


def _libraries() -> set[str]:
    """The system's folders with the shared libraries that this process has loaded, and single ones from elsewhere."""
    with open("/proc/self/maps", errors="surrogateescape") as file:
        mapped = {line.rstrip("\n").split(maxsplit=5)[-1] for line in file}
    loaded = {path for path in mapped if path.startswith("/") and ".so" in os.path.basename(path)}
    places = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if path.startswith("/")]
    given = {path for place in places for path in glob.glob(os.path.join(glob.escape(place), "*.so*"))}
    given = {path for path in given if os.path.isfile(path)}
    folders = {os.path.dirname(path) for path in loaded}
    whole = {path for path in folders if path.startswith(tuple(f"{place}/" for place in _OF_LIBRARIES))}
    whole |= folders & set(_OF_LIBRARIES)
    single = {path for path in loaded if os.path.dirname(path) not in whole}
    return whole | single | given | set(glob.glob("/lib*/ld-*"))


def _enter_new_root(folder: str, has_own_proc: bool) -> None:
    """Replace this process's root by an empty one with `needed_paths`, /proc and the path to `folder`."""
    needed = needed_paths()
    if _LIBC.unshare(_NEWNS) != 0:
        raise OSError("no namespace of mounts")
    mount("none", "/", None, 0x44000)  # MS_REC | MS_PRIVATE
    mount("tmpfs", folder, "tmpfs", 0x2, "size=4m,mode=755")  # MS_NOSUID
    try:
        shown: set[str] = set()
        for path in needed:
            _show(path, folder, shown)
        for path in ("/proc", folder):
            os.makedirs(folder + path, exist_ok=True)
        _mount_proc(f"{folder}/proc", has_own_proc)
        os.chdir(folder)
        _pivot()
    except OSError:
        os.chdir("/")
        _LIBC.umount2(folder.encode(), _DETACH)
        raise


def _mount_proc(place: str, has_own: bool) -> None:
    if has_own:
        with contextlib.suppress(OSError):  # a container may hide parts of /proc, and then has no new one
            mount("proc", place, "proc", 0xE)
            return
    mount("/proc", place, None, _BIND)


def _pivot() -> None:
    """Make the working directory the root, and let the old root go (pivot_root(2), the notes on `.`)."""
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None or _LIBC.syscall(number, b".", b".") != 0 or _LIBC.umount2(b".", _DETACH) != 0:
        raise OSError(ctypes.get_errno(), "the root of the file system cannot be changed")
    os.chdir("/")


def _show(path: str, root: str, shown: set[str]) -> None:
    """Bind a path into the new root under its own name, with the links on the way to it."""
    done, parts = "/", path.strip("/").split("/")
    for number, part in enumerate(parts):
        here, rest = os.path.join(done, part), parts[number + 1 :]
        is_shown = any(f"{here}/".startswith(f"{above}/") for above in shown)
        if os.path.islink(here):
            target = os.readlink(here)
            if not is_shown and not os.path.lexists(root + here):
                os.symlink(target, root + here)
            _show(os.path.normpath(os.path.join(done, target, *rest)), root, shown)
            return
        if not is_shown and (rest or os.path.isdir(here)):
            os.makedirs(root + here, exist_ok=True)
        done = here
    if not is_shown:
        if not os.path.isdir(done):
            os.close(os.open(root + done, os.O_CREAT, 0o644))
        mount(done, root + done, None, _BIND)
        shown.add(done)


def _read_only() -> None:
    attributes = (ctypes.c_uint64 * 4)(1, 0, 0, 0)  # struct mount_attr with MOUNT_ATTR_RDONLY
    if _LIBC.syscall(442, -100, b"/", 0x8000, attributes, 32) != 0:  # mount_setattr, AT_FDCWD, AT_RECURSIVE
        raise OSError("the file system cannot be made read-only")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """The system call; raises OSError."""
    if _LIBC.mount(source.encode(), target.encode(), kind and kind.encode(), flags, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)


def check_python(user: int) -> None:
    """Raise PermissionError, which says what to do, where the program could not import from Python's library."""
    for path in _unreadable(user):
        raise PermissionError(
            f"programs run as user {user}, not as root, and that user cannot read Python in {path!r}: move Python out "
            "of root's home, let others pass (chmod o+x), or start as another user"
        )


def _unreadable(user: int) -> list[str]:
    """What of Python this user cannot read."""
    if user == os.getuid():
        return []
    needed = sorted(_pythons_folders())  # before, since what that user cannot reach does not exist for it
    os.seteuid(user)
    try:
        modes = {path: os.R_OK | (os.X_OK if os.path.isdir(path) else 0) for path in needed}
        return [path for path in needed if not os.access(path, modes[path], effective_ids=True)]
    finally:
        os.seteuid(0)
