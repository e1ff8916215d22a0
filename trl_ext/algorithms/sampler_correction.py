"""Importance weights for the mismatch between the engine that sampled and the model that is trained.

w = pi_old(trainer) / pi_old(sampler), per token or per sequence, truncated or masked outside [clip_min, clip_max].
Truncated importance sampling: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (Yao et al.
2025); the modes are TRL's `vllm_importance_sampling_mode`.

All inputs are (B, T); a sampler log-probability of NaN (not reported) counts as no mismatch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trl_ext.registry import Registry

SAMPLER_CORRECTIONS = Registry("sampler correction")


def _log_weight(old_logp: Tensor, sampled_logp: Tensor, mask: Tensor) -> Tensor:
    return torch.nan_to_num((old_logp - sampled_logp) * mask, nan=0.0)


def _truncate(weight: Tensor, low: float | None, high: float | None) -> Tensor:
    return weight.clamp(min=low if low is not None else -math.inf, max=high if high is not None else math.inf)


def _mask(weight: Tensor, low: float | None, high: float | None) -> Tensor:
    outside = (weight < (-math.inf if low is None else low)) | (weight > (math.inf if high is None else high))
    return weight.masked_fill(outside, 0.0)


@SAMPLER_CORRECTIONS.register
def token_truncate(
    old_logp: Tensor, sampled_logp: Tensor, mask: Tensor, *, clip_min: float | None = None, clip_max: float | None = 3.0
) -> Tensor:
    """(B, T): each token's weight, clamped."""
    return _truncate(_log_weight(old_logp, sampled_logp, mask).exp(), clip_min, clip_max)


@SAMPLER_CORRECTIONS.register
def token_mask(
    old_logp: Tensor, sampled_logp: Tensor, mask: Tensor, *, clip_min: float | None = None, clip_max: float | None = 3.0
) -> Tensor:
    """(B, T): each token's weight, 0 outside the range."""
    return _mask(_log_weight(old_logp, sampled_logp, mask).exp(), clip_min, clip_max)


@SAMPLER_CORRECTIONS.register
def sequence_truncate(
    old_logp: Tensor, sampled_logp: Tensor, mask: Tensor, *, clip_min: float | None = None, clip_max: float | None = 3.0
) -> Tensor:
    """(B, 1): the sequence's weight, clamped."""
    log_weight = _log_weight(old_logp, sampled_logp, mask).sum(dim=1, keepdim=True)
    return _truncate(log_weight.exp(), clip_min, clip_max)


@SAMPLER_CORRECTIONS.register
def sequence_mask(
    old_logp: Tensor, sampled_logp: Tensor, mask: Tensor, *, clip_min: float | None = None, clip_max: float | None = 3.0
) -> Tensor:
    """(B, 1): the sequence's weight, 0 outside the range: such a sequence has no gradient."""
    log_weight = _log_weight(old_logp, sampled_logp, mask).sum(dim=1, keepdim=True)
    return _mask(log_weight.exp(), clip_min, clip_max)
