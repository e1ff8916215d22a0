"""The mismatch between the engine that sampled and the model that is trained: a weight, and what is rejected.

The ratio is pi_old(trainer) / pi_old(sampler) of a token, or the product of a sequence's. Two axes: `SAMPLER_WEIGHTS`
multiply the policy loss, `SAMPLER_REJECTIONS` say what keeps one. TRL's `vllm_importance_sampling_mode` is one of four
combinations, see `trl_mode`.

A product over a sequence drifts away from 1 with its length, so a bound on it rejects long sequences first; the means
over tokens (`sequence_mean_ratio`, `sequence_mean_k3`) do not.

All inputs are (B, T); a sampler log-probability of NaN (not reported) counts as no mismatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trl_ext.registry import Registry, unknown

SAMPLER_WEIGHTS = Registry("sampler weight")
SAMPLER_REJECTIONS = Registry("sampler rejection")


Pair = tuple[tuple[str, dict[str, Any]], tuple[str, dict[str, Any]]]
# Of a run that chooses none. A product over a sequence keeps fewer of the long ones, see docs/results/length_trap.md.
SAFE_PAIR: Pair = ("token", {}), ("sequence_mean_k3", {})


@dataclass(frozen=True)
class SamplerCorrection:
    """A weight and a rejection, chosen apart."""

    weight: Callable[[Tensor, Tensor, Tensor], Tensor]  # -> (B, 1) or (B, T)
    keeps: Callable[[Tensor, Tensor, Tensor], Tensor]  # -> (B, 1) or (B, T) bool

    def __call__(self, old_logp: Tensor, sampled_logp: Tensor, mask: Tensor) -> Tensor:
        """(B, 1) or (B, T): the weight, 0 where rejected."""
        return self.weight(old_logp, sampled_logp, mask) * self.keeps(old_logp, sampled_logp, mask)


def trl_mode(mode: str, low: float | None, high: float | None) -> Pair:
    """Names and options of the weight and of the rejection that TRL's mode and bounds mean.

    Raises:
        UnknownName: TRL has no such mode.
    """
    level, _, kind = mode.partition("_")
    if level not in ("token", "sequence") or kind not in ("truncate", "mask"):
        known = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
        raise unknown("value of vllm_importance_sampling_mode", mode, known)
    if kind == "truncate":
        return (level, {"clip_min": low, "clip_max": high}), ("keep_all", {})
    return (level, {"clip_max": None}), (f"{level}_ratio", {"low": low, "high": high})


def _log_ratio(old_logp: Tensor, sampled_logp: Tensor, mask: Tensor) -> Tensor:
    return torch.nan_to_num((old_logp - sampled_logp) * mask, nan=0.0)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    return values.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def _k3(log_ratio: Tensor) -> Tensor:
    return torch.expm1(log_ratio) - log_ratio


def _within(ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    return (ratio >= (-math.inf if low is None else low)) & (ratio <= (math.inf if high is None else high))


@SAMPLER_WEIGHTS.register
def unweighted(old_logp: Tensor, sampled_logp: Tensor, mask: Tensor) -> Tensor:
    """(B, 1): 1."""
    return torch.ones_like(old_logp[:, :1])


@SAMPLER_WEIGHTS.register
def token(
    old_logp: Tensor, sampled_logp: Tensor, mask: Tensor, *, clip_min: float | None = None, clip_max: float | None = 2.0
) -> Tensor:
    """(B, T): each token's ratio, truncated to clip_min .. clip_max.

    Token-level truncated importance sampling ("Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
    Yao et al. 2025): less variance than `sequence`, and a bias.
    """
    return _log_ratio(old_logp, sampled_logp, mask).exp().clamp(clip_min, math.inf if clip_max is None else clip_max)


@SAMPLER_WEIGHTS.register
def sequence(
    old_logp: Tensor, sampled_logp: Tensor, mask: Tensor, *, clip_min: float | None = None, clip_max: float | None = 2.0
) -> Tensor:
    """(B, 1): the sequence's ratio, truncated to clip_min .. clip_max; unbiased without truncation."""
    ratio = _log_ratio(old_logp, sampled_logp, mask).sum(dim=1, keepdim=True).exp()
    return ratio.clamp(clip_min, math.inf if clip_max is None else clip_max)


@SAMPLER_REJECTIONS.register
def keep_all(old_logp: Tensor, sampled_logp: Tensor, mask: Tensor) -> Tensor:
    """(B, 1): every sequence is kept."""
    return torch.ones_like(old_logp[:, :1], dtype=torch.bool)


@SAMPLER_REJECTIONS.register
def token_ratio(
    old_logp: Tensor, sampled_logp: Tensor, mask: Tensor, *, low: float | None = 0.5, high: float | None = 5.0
) -> Tensor:
    """(B, T): tokens with a ratio in low .. high, both included. IcePop (ringtech.notion.site/icepop)."""
    return _within(_log_ratio(old_logp, sampled_logp, mask).exp(), low, high)


@SAMPLER_REJECTIONS.register
def sequence_ratio(
    old_logp: Tensor, sampled_logp: Tensor, mask: Tensor, *, low: float | None = None, high: float | None = 3.0
) -> Tensor:
    """(B, 1): sequences with a ratio, the product over tokens, in low .. high. TRL's `sequence_mask`."""
    return _within(_log_ratio(old_logp, sampled_logp, mask).sum(dim=1, keepdim=True).exp(), low, high)


@SAMPLER_REJECTIONS.register
def sequence_mean_ratio(
    old_logp: Tensor, sampled_logp: Tensor, mask: Tensor, *, low: float | None = 0.95, high: float | None = 1.05
) -> Tensor:
    """(B, 1): sequences whose tokens' ratios have a geometric mean in low .. high. verl's `seq_mean_k1`."""
    return _within(_mean(_log_ratio(old_logp, sampled_logp, mask), mask).exp(), low, high)


@SAMPLER_REJECTIONS.register
def token_k3(old_logp: Tensor, sampled_logp: Tensor, mask: Tensor, *, threshold: float = 0.1) -> Tensor:
    """(B, T): tokens with ratio - 1 - log ratio, an estimate of KL(sampler || trainer), of at most `threshold`."""
    return _k3(_log_ratio(old_logp, sampled_logp, mask)) <= threshold


@SAMPLER_REJECTIONS.register
def sequence_mean_k3(old_logp: Tensor, sampled_logp: Tensor, mask: Tensor, *, threshold: float = 0.01) -> Tensor:
    """(B, 1): sequences whose tokens have a mean `token_k3` estimate of at most `threshold`. verl's `seq_mean_k3`."""
    return _mean(_k3(_log_ratio(old_logp, sampled_logp, mask)) * mask, mask) <= threshold
