"""Whether the disk has room for another checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from accelerate import Accelerator

from trl_ext.runs.checkpoints import checkpoints, size

_SPARE = 1.05  # times the last checkpoint's size


def lack_of_room(run: Path, accelerator: Accelerator) -> str | None:
    """Why the disk has no room for another checkpoint, the same on every rank; None if it has."""
    found = None
    last = checkpoints(run)[:1]
    if last and accelerator.is_main_process:
        needed, free = int(_SPARE * size(last[0])), shutil.disk_usage(run).free
        if free < needed:
            found = f"it needs about {needed / 1e9:.3g} GB and the disk of {run} has {free / 1e9:.3g} GB free"
    is_full = torch.tensor([found is not None], device=accelerator.device)
    return (found or "the disk is full") if accelerator.gather(is_full).any() else None
