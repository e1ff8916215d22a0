"""Faults that a training survives: optimizer steps whose gradient is not finite, and a disk without room.

A loss in float16 is multiplied by a scale, so that small gradients do not vanish. The scaler begins with a large one,
skips each step whose gradient overflows, and lowers the scale until one does not; now and then it tries a larger one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from trl_ext.io import write_text
from trl_ext.runs.checkpoints import checkpoints, size

_SPARE = 1.05  # times the last checkpoint's size
_NAMED = 10  # parameters that a report names


class NonFiniteError(RuntimeError):
    """Too many optimizer steps in a row had a gradient that is not finite."""


def loss_scale(accelerator: Accelerator) -> float | None:
    """The scale that a scaler lowers after a gradient that is not finite; None if there is none, or it is at its least.

    A scale of 1 or less changes nothing that float16 cannot have; DeepSpeed has a least one in its settings.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        engine = accelerator.deepspeed_engine_wrapped.engine
        of_engine: Any = getattr(engine.optimizer, "loss_scaler", None)
        falls = getattr(of_engine, "dynamic", False) and of_engine.cur_scale > of_engine.min_scale
        return float(of_engine.cur_scale) if falls else None
    scaler = accelerator.scaler
    scale = scaler.get_scale() if scaler is not None and scaler.is_enabled() else 1.0
    return scale if scale > 1 else None


def write_report(path: Path, model: nn.Module, step: int, norm: float, rows: Sequence[dict[str, Any]]) -> None:
    """Write as JSON which parameters have a non-finite gradient, and the rows that this rank computed it from."""
    named = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not parameter.grad.isfinite().all()
    ]
    report = {"step": step, "grad_norm": norm, "parameters": named[:_NAMED], "rows": rows}
    write_text(path, json.dumps(report, indent=1, ensure_ascii=False, default=str) + "\n")


def lack_of_room(run: Path, accelerator: Accelerator) -> str | None:
    """Why the disk has no room for another checkpoint, the same on every rank; None if it has."""
    lack = None
    last = checkpoints(run)[:1]
    if last and accelerator.is_main_process:
        needed, free = int(_SPARE * size(last[0])), shutil.disk_usage(run).free
        if free < needed:
            lack = f"it needs about {needed / 1e9:.3g} GB and the disk of {run} has {free / 1e9:.3g} GB free"
    is_full = torch.tensor([lack is not None], device=accelerator.device)
    return (lack or "the disk is full") if accelerator.gather(is_full).any() else None
