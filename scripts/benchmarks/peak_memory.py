"""Most memory in use since a moment: of the GPU where there is one, else of the process (Linux)."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch


def start_peak() -> int:
    """Reset the peak, and return the bytes in use now."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free within the process would be used first, and not be seen
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    return _status("VmRSS")


def peak() -> int:
    """Most bytes in use since `start_peak`."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return _status("VmHWM")


def _status(field: str) -> int:
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
