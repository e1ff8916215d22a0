"""Policy loss, sampler correction and KL penalty, aggregated: the scalar that is differentiated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trl_ext.algorithms.types import LossInputs, StepTotals, TokenLoss


@dataclass(frozen=True)
class Objective:
    """One point on the axes policy loss x aggregation x KL, called once per micro-batch.

    aggregate(w * policy_loss + beta * kl): the sampler weight w corrects the policy term only, as in TRL.
    `kl_bias_correction` multiplies the KL by pi / pi_old, with gradient, which makes the gradient of k1 and k3 unbiased
    (DeepSeek-V3.2, arXiv:2512.02556, section 3.1); it is TRL's `use_bias_correction_kl`. An estimator whose gradient is
    the KL's as it is (`kl_by_gradient`, as k2's) is only weighed by the ratio, without gradient (Tang and Munos,
    arXiv:2506.09477). `off_policy_threshold` is TRL's `off_policy_mask_threshold`, see `keeps_on_policy`.
    """

    policy_loss: Callable[[LossInputs], TokenLoss]
    aggregate: Callable[[Tensor, Tensor, StepTotals], Tensor]
    kl: Callable[[Tensor, Tensor], Tensor]
    beta: float = 0.0
    kl_bias_correction: bool = False
    kl_by_gradient: bool = False
    off_policy_threshold: float | None = None

    def __call__(
        self,
        x: LossInputs,
        totals: StepTotals,
        *,
        ref_logp: Tensor | None = None,
        sampler_weight: Tensor | None = None,
        sampled_logp: Tensor | None = None,
        policy_mask: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The micro-batch's share of the step's loss, and (B, T) quantities to average over unmasked tokens.

        Args:
            x: log-probabilities, advantages and mask.
            totals: counts over the whole optimizer step.
            ref_logp: (B, T) under the reference model; needed when beta is not 0.
            sampler_weight: (B, 1) or (B, T) from `sampler_correction`, or None for no correction.
            sampled_logp: (B, T) under the engine that sampled, NaN where unknown; None where that is `x.old_logp`.
            policy_mask: (B, T) bool, tokens whose policy loss counts (the KL penalty of all does), or None for all.

        Raises:
            ValueError: beta is not 0 and `ref_logp` is missing.
        """
        # A masked token may have any log-probability; with its gradient cut, exp of it cannot make 0 * inf backward.
        x = dataclasses.replace(x, logp=torch.where(x.mask, x.logp, x.logp.detach()))
        token_loss = self.policy_loss(x)
        loss, metrics = token_loss.loss, dict(token_loss.metrics)
        if self.off_policy_threshold is not None:
            sampled = x.old_logp if sampled_logp is None else sampled_logp
            loss = loss.masked_fill(~keeps_on_policy(x, sampled, self.off_policy_threshold), 0.0)
        if policy_mask is not None:
            loss = loss.masked_fill(~policy_mask, 0.0)
        if sampler_weight is not None:
            loss = loss * sampler_weight
            metrics["sampling/masked_frac"] = (sampler_weight == 0).float().expand_as(loss)
        if self.beta != 0:
            if ref_logp is None:
                raise ValueError(f"beta is {self.beta:g}, so the objective needs ref_logp")
            kl = self.kl(x.logp, ref_logp)
            if self.kl_bias_correction:
                ratio = torch.exp(x.logp - x.old_logp)
                kl = kl * (ratio.detach() if self.kl_by_gradient else ratio)
            loss = loss + self.beta * kl
            metrics["kl"] = kl.detach()
        return self.aggregate(loss, x.mask, totals), metrics

    def leaves_idle_rows_alone(self) -> bool:
        """Whether a step may leave out rows with advantage 0: the loss declares that it may, and beta is 0."""
        return self.beta == 0 and getattr(self.policy_loss, "zero_advantage_is_noop", False)


def keeps_on_policy(x: LossInputs, sampled_logp: Tensor, threshold: float) -> Tensor:
    """(B, 1) bool: sequences that train, all but those with a negative advantage that the policy has moved away from.

    Moved away: the mean over tokens of log(pi_sampled / pi) exceeds `threshold`; an unknown token counts as 0.
    DeepSeek-V3.2 (arXiv:2512.02556), as TRL has it.
    """
    moved = (sampled_logp - x.logp.detach()).nan_to_num(nan=0.0)
    mean = (moved * x.mask).sum(dim=1, keepdim=True) / x.mask.sum(dim=1, keepdim=True).clamp(min=1)
    return (x.advantage >= 0) | (mean <= threshold)
