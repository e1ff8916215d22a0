"""Rows of random log-probabilities in float64, ragged as a batch is, shared by the tests of the loss."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from trl_ext.algorithms.policy_losses import POLICY_LOSSES, with_inputs
from trl_ext.algorithms.types import LossInputs, StepTokens, StepTotals, TokenLoss

LENGTHS = (5, 2, 6, 1, 0, 3)  # one row has no token that trains
ROWS, TOKENS = len(LENGTHS), max(LENGTHS)


def ragged_mask() -> Tensor:
    mask = torch.arange(TOKENS) < torch.tensor(LENGTHS)[:, None]
    mask[2, 1] = False  # a hole, as a tool's answer leaves one
    return mask


def loss_inputs(off_policy: float = 0.3, per_token: bool = False) -> LossInputs:
    """Inputs whose log-ratios have the standard deviation `off_policy`; `logp` is a leaf."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old = -noise(ROWS, TOKENS).abs()
    advantage = noise(ROWS, TOKENS if per_token else 1)
    logp = (old + off_policy * noise(ROWS, TOKENS)).requires_grad_()
    return LossInputs(logp, old, advantage, ragged_mask())


def totals_of(mask: Tensor, max_tokens: float = 10.0) -> StepTotals:
    return StepTotals(sequences=float(len(mask)), tokens=float(mask.sum()), max_tokens=max_tokens)


def policy_loss(name: str, **options: float) -> Callable[[LossInputs], TokenLoss]:
    """A policy loss by name, whose further inputs follow from `x`: the sampler and the reference are the old policy."""
    member = POLICY_LOSSES.build(name, **options)

    @functools.wraps(member)
    def loss(x: LossInputs) -> TokenLoss:
        old = x.old_logp
        rows, step = torch.arange(len(old)), StepTokens.of(x)
        return with_inputs(member, sampled_logp=old, ref_logp=old, entropy=-old, group=rows, step=step)(x)

    return loss
