"""Locks that a killed compilation of DeepSpeed's operations left behind, for which torch waits without a word."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import psutil


def abandoned_locks(environment: Mapping[str, str]) -> list[Path]:
    """The locks in torch's cache of extensions that no process of this user on this machine holds open."""
    from torch.utils.cpp_extension import get_default_build_root

    given = environment.get("TORCH_EXTENSIONS_DIR")
    root, pattern = (Path(given), "*/lock") if given else (Path(get_default_build_root()), "*/*/lock")
    locks = {path.resolve() for path in root.glob(pattern)}
    return sorted(locks - _open_files()) if locks else []


def _open_files() -> set[Path]:
    found = set()
    for process in psutil.process_iter():
        try:
            found |= {Path(file.path) for file in process.open_files()}
        except (psutil.Error, OSError):  # another user's, or it has ended
            continue
    return found


def warning_of_locks(environment: Mapping[str, str] = os.environ) -> str | None:
    """What to say before a run under DeepSpeed, which would wait for such a lock until its time limit."""
    if environment.get("ACCELERATE_USE_DEEPSPEED") != "true" or not (locks := abandoned_locks(environment)):
        return None
    return (
        f"warning: a compilation for DeepSpeed was killed; torch waits until {', '.join(map(str, locks))} is gone: "
        "remove it, unless another host that shares this folder compiles there now"
    )
