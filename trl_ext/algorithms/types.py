"""The data that the axes exchange: frozen dataclasses, with shapes checked where data enters.

Letters: P prompts, G completions per prompt, B rows of a micro-batch, T completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a policy loss.

    A (B,) advantage times a (B, T) ratio broadcasts over tokens without an error when B == T, hence the check.

    Raises:
        ValueError: a shape does not fit, `mask` is not boolean, or a gradient would flow into `old_logp`.
    """

    logp: Tensor  # (B, T) log-probability of each sampled token under the current policy; has grad
    old_logp: Tensor  # (B, T) the same under the policy that generated the rollout; no grad
    advantage: Tensor  # (B, 1) or (B, T)
    mask: Tensor  # (B, T) bool, True on the completion tokens that train

    def __post_init__(self) -> None:
        if self.logp.ndim != 2:
            raise ValueError(f"logp must be (B, T), got {tuple(self.logp.shape)}")
        rows, tokens = self.logp.shape
        for name, allowed in {
            "old_logp": [(rows, tokens)],
            "mask": [(rows, tokens)],
            "advantage": [(rows, 1), (rows, tokens)],
        }.items():
            shape = tuple(getattr(self, name).shape)
            if shape not in allowed:
                raise ValueError(f"{name} must be {' or '.join(map(str, allowed))}, got {shape}")
        if self.mask.dtype is not torch.bool:
            raise ValueError(f"mask must be boolean, got {self.mask.dtype}")
        if self.old_logp.requires_grad:
            raise ValueError("old_logp must not carry a gradient; detach it")


@dataclass(frozen=True)
class TokenLoss:
    """An unreduced policy loss: one value per token, and per-token quantities to log under their own names."""

    loss: Tensor  # (B, T)
    metrics: dict[str, Tensor] = field(default_factory=dict)  # name -> (B, T), averaged over unmasked tokens


@dataclass(frozen=True)
class StepTotals:
    """Counts over the whole optimizer step: all micro-batches of all ranks.

    With them, the sum of the aggregate over micro-batches and ranks is independent of the division into micro-batches.
    """

    sequences: float  # rows, including those whose tokens are all masked
    tokens: float  # unmasked completion tokens
    max_tokens: float  # the maximum completion length, a constant of the run
