"""Optimizer steps whose gradient is not finite: the error, and the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from trl_ext.io import write_text

_NAMED = 10  # parameters that a report names


class NonFiniteError(RuntimeError):
    """Too many optimizer steps in a row had a gradient that is not finite."""


def write_report(path: Path, model: nn.Module, step: int, norm: float, rows: Sequence[dict[str, Any]]) -> None:
    """Write as JSON which parameters have a non-finite gradient, and the rows that this rank computed it from."""
    named = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not parameter.grad.isfinite().all()
    ]
    report = {"step": step, "grad_norm": norm, "parameters": named[:_NAMED], "rows": rows}
    write_text(path, json.dumps(report, indent=1, ensure_ascii=False, default=str) + "\n")
