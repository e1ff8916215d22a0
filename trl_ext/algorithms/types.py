"""The data that the axes exchange: frozen dataclasses, with shapes checked where data enters.

Letters: P prompts, G completions per prompt, B rows of a micro-batch, T completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # the axes import nothing but torch
    from jaxtyping import Bool, Float, Int


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a policy loss.

    A (B,) advantage times a (B, T) ratio broadcasts over tokens without an error when B == T, hence the check.

    Raises:
        ValueError: a shape does not fit, `mask` is not boolean, or a gradient would flow into `old_logp`.
    """

    logp: Float[Tensor, "B T"]  # log-probability of each sampled token under the current policy; has grad
    old_logp: Float[Tensor, "B T"]  # the same under the policy that generated the rollout; no grad
    advantage: Float[Tensor, "B 1"] | Float[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]  # True on the completion tokens that train

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
class StepTokens:
    """The N tokens that an optimizer step trains on, of all micro-batches and ranks, before it changes the policy.

    In the order of the rollout's rows, however the step is divided.
    """

    logp: Float[Tensor, " N"]  # under the current policy, like the others without a gradient
    old_logp: Float[Tensor, " N"]
    advantage: Float[Tensor, " N"]
    place: Int[Tensor, "B T"]  # which of the N a token of this micro-batch is; -1 where it is masked

    def of_micro_batch(self, values: Tensor) -> Tensor:
        """(N,) values of the step's tokens -> (B, T), those of this micro-batch; 0 where masked."""
        return torch.cat([values, values.new_zeros(1)])[self.place]

    @classmethod
    def of(cls, x: LossInputs) -> StepTokens:
        """Of a step that has one micro-batch, on one rank."""
        place = torch.full(x.mask.shape, -1, device=x.mask.device)
        place[x.mask] = torch.arange(int(x.mask.sum()), device=place.device)
        advantage = x.advantage.expand_as(x.logp)
        return cls(x.logp.detach()[x.mask], x.old_logp[x.mask], advantage[x.mask], place)


@dataclass(frozen=True)
class TokenLoss:
    """An unreduced policy loss: one value per token, and per-token quantities to log under their own names."""

    loss: Float[Tensor, "B T"]
    metrics: dict[str, Float[Tensor, "B T"]] = field(default_factory=dict)  # by name; averaged over unmasked tokens


@dataclass(frozen=True)
class StepTotals:
    """Counts over the whole optimizer step: all micro-batches of all ranks.

    With them, the sum of the aggregate over micro-batches and ranks is independent of the division into micro-batches.
    """

    sequences: float  # rows, including those whose tokens are all masked
    tokens: float  # unmasked completion tokens
    max_tokens: float  # the maximum completion length, a constant of the run
