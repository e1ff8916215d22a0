"""Policy losses: `LossInputs` -> one loss per token, unreduced, with per-token metrics.

r is the ratio pi / pi_old of the sampled token, A its advantage. Every loss here has the gradient -A grad(logp) at
r = 1 (summed over the tokens of a sequence), so on-policy they all agree.

Letters: B rows of a micro-batch, T completion tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from trl_ext.algorithms.types import LossInputs, TokenLoss
from trl_ext.registry import Registry


def _fault(loss: Callable[[LossInputs], TokenLoss], rows: int) -> str | None:
    logp = torch.full((rows, 3), -1.0, requires_grad=True)  # (B, T)
    x = LossInputs(logp, logp.detach(), torch.ones(rows, 1), torch.ones(rows, 3, dtype=torch.bool))
    found = loss(x)
    if not isinstance(found, TokenLoss):
        return f"must return TokenLoss(loss, metrics) from trl_ext, got {type(found).__name__}"
    misshapen = [name for name, value in {"its loss": found.loss, **found.metrics}.items() if value.shape != logp.shape]
    if misshapen:
        return f"must return one value per token, (B, T): {', '.join(misshapen)} has another shape"
    if getattr(loss, "zero_advantage_is_noop", False) and not _is_noop_at_zero_advantage(loss, x):
        return "declares zero_advantage_is_noop, and at advantage 0 its loss, its gradient or a metric is not 0"
    return None


def _is_noop_at_zero_advantage(loss: Callable[[LossInputs], TokenLoss], x: LossInputs) -> bool:
    x = dataclasses.replace(x, old_logp=x.old_logp - 0.5, advantage=torch.zeros_like(x.advantage))
    found = loss(x)
    values = [found.loss, *found.metrics.values()]
    if found.loss.requires_grad:
        values += torch.autograd.grad(found.loss.sum(), x.logp, allow_unused=True, materialize_grads=True)
    return not any(value.any() for value in values)


# zero_advantage_is_noop: at advantage 0, the loss, its gradient and the metrics are 0, so an optimizer step may skip
# the row.
POLICY_LOSSES = Registry("policy loss", _fault, properties=["zero_advantage_is_noop"])


@POLICY_LOSSES.register(zero_advantage_is_noop=True)
def reinforce(x: LossInputs) -> TokenLoss:
    """-A log pi. The score-function gradient (Williams 1992, doi:10.1007/BF00992696); ignores `old_logp`."""
    return TokenLoss(-x.advantage * x.logp)


@POLICY_LOSSES.register(zero_advantage_is_noop=True)
def importance_ratio(x: LossInputs) -> TokenLoss:
    """-r A, never clipped: the off-policy surrogate of TRPO (arXiv:1502.05477, eq. 14) without its constraint.

    The handout's GRPO-No-Clip.
    """
    ratio = torch.exp(x.logp - x.old_logp)
    return TokenLoss(-ratio * x.advantage)


@POLICY_LOSSES.register(zero_advantage_is_noop=True)
def ppo_clip(
    x: LossInputs, *, eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = None
) -> TokenLoss:
    """Clipped surrogate, -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A).

    Equal eps is PPO (arXiv:1707.06347, eq. 7); unequal eps is clip-higher (DAPO, arXiv:2503.14476, section 3.1).
    `dual_clip` > 1 + eps_high also bounds the loss of a negative advantage at r = dual_clip (arXiv:1912.09729);
    it is TRL's `delta`.
    """
    ratio = torch.exp(x.logp - x.old_logp)
    return TokenLoss(*_clipped(ratio, x.advantage, eps_low, eps_high, dual_clip))


@POLICY_LOSSES.register(zero_advantage_is_noop=True)
def gspo(x: LossInputs, *, eps_low: float = 3e-4, eps_high: float = 4e-4) -> TokenLoss:
    """`ppo_clip` on the sequence ratio s = exp(mean over tokens of log r), the same value at every token.

    GSPO (arXiv:2507.18071, eq. 5 and 7; clipping ranges from its section 5.1). With `sequence_mean` the aggregate
    is the paper's objective.
    """
    log_ratio = torch.where(x.mask, x.logp - x.old_logp, 0.0)
    length = x.mask.sum(dim=1, keepdim=True).clamp(min=1)
    ratio = torch.exp(log_ratio.sum(dim=1, keepdim=True) / length).expand_as(x.logp)  # (B, T)
    return TokenLoss(*_clipped(ratio, x.advantage, eps_low, eps_high, None))


@POLICY_LOSSES.register(zero_advantage_is_noop=True)
def cispo(x: LossInputs, *, ratio_max: float = 5.0) -> TokenLoss:
    """-min(r, ratio_max) A log pi, the clipped ratio without gradient: no token's gradient is dropped.

    CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4-5) without a lower bound; ratio_max is the paper's 1 + eps_high.
    """
    ratio = torch.exp(x.logp - x.old_logp).detach()
    is_capped = (ratio > ratio_max) & (x.advantage > 0)
    return TokenLoss(-ratio.clamp(max=ratio_max) * x.advantage * x.logp, {"clip_ratio/high_mean": is_capped.float()})


@POLICY_LOSSES.register(zero_advantage_is_noop=True)
def sapo(x: LossInputs, *, temperature_pos: float = 1.0, temperature_neg: float = 1.05) -> TokenLoss:
    """-(4 / tau) sigmoid(tau (r - 1)) A: a soft trust region, tau chosen by the advantage's sign.

    SAPO (arXiv:2511.20347). The factor 4 / tau gives slope 1 at r = 1.
    """
    ratio = torch.exp(x.logp - x.old_logp)
    temperature = torch.where(x.advantage > 0, x.logp.new_tensor(temperature_pos), x.logp.new_tensor(temperature_neg))
    return TokenLoss(-torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * x.advantage)


def _clipped(
    ratio: Tensor, advantage: Tensor, eps_low: float, eps_high: float, dual_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high)
    unclipped = ratio if dual_clip is None else ratio.clamp(max=dual_clip)
    loss = -torch.minimum(unclipped * advantage, clipped * advantage)
    low = ((ratio < 1 - eps_low) & (advantage < 0)).expand_as(ratio).float()
    high = ((ratio > 1 + eps_high) & (advantage > 0)).expand_as(ratio).float()
    return loss, {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
