"""The widest floating-point numbers that a device has: MPS, Apple's GPU, has no float64."""

from __future__ import annotations

import torch


def widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device that refuses it. It is asked, since a driver may come to have it."""
    try:
        torch.empty(0, dtype=torch.float64, device=device)
    except Exception:  # MPS raises TypeError, others what their driver does
        return torch.float32
    return torch.float64
