"""On PYTHONPATH this folder takes from Python what it lacks on macOS: packages, and names that only Linux has.

A program that is started by `python -m tests.support.on_macos FILE` believes in addition that it runs there.
"""

from __future__ import annotations

import fcntl
import importlib.machinery
import importlib.metadata
import os
import resource
import select
import signal
import sys
import sysconfig
from typing import Any

PACKAGES = {"vllm", "deepspeed", "bitsandbytes", "triton", "flash_attn", "liger_kernel", "flashinfer"}
LINUX = {
    os: ("sched_getaffinity", "sched_setaffinity", "pidfd_open", "memfd_create", "eventfd", "unshare", "setns",
         "O_PATH", "getresuid", "posix_fadvise", "copy_file_range", "splice"),
    signal: ("pidfd_send_signal", "sigtimedwait", "sigwaitinfo", "SIGRTMIN", "SIGPWR", "SIGSTKFLT"),
    resource: ("RUSAGE_THREAD", "prlimit"),
    select: ("epoll",),
    fcntl: ("F_SETSIG", "F_GETSIG", "F_SETPIPE_SZ", "F_ADD_SEALS"),
}  # fmt: skip


class _Finder(importlib.machinery.PathFinder):
    """As the one of the path, without these packages."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        """None for what is not there."""
        return None if fullname.partition(".")[0] in PACKAGES else super().find_spec(fullname, path, target)


sys.meta_path[:] = [_Finder if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
_distribution = importlib.metadata.distribution


def _distribution_that_is_there(name: str) -> Any:
    if name.replace("-", "_").removesuffix("_cpu") in PACKAGES:
        raise importlib.metadata.PackageNotFoundError(name)
    return _distribution(name)


importlib.metadata.distribution = _distribution_that_is_there
for module, names in LINUX.items():
    for name in names:
        vars(module).pop(name, None)
if any("trl_ext.rewards.workers" in word for word in sys.orig_argv):  # which loads no library by the platform's name
    sysconfig.get_config_vars()  # a file by the platform's name
    sys.platform = "darwin"
