"""Sums and means over unmasked tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_normalize(tensor: Tensor, mask: Tensor, normalize_constant: float, dim: int | None = None) -> Tensor:
    """Sum over unmasked elements along `dim` (all if None), divided by a constant; 0 if all are masked."""
    return masked_sum(tensor, mask, dim) / normalize_constant


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over unmasked elements along `dim` (all if None); NaN if nothing is unmasked."""
    count = mask.sum() if dim is None else mask.sum(dim=dim)
    return masked_sum(tensor, mask, dim) / count


def masked_sum(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum over unmasked elements along `dim` (all if None)."""
    kept = torch.where(mask.bool(), tensor, torch.zeros_like(tensor))  # a masked NaN must not count
    return kept.sum() if dim is None else kept.sum(dim=dim)
