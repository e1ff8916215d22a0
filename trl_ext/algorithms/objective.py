"""Policy loss, sampler correction and KL penalty, aggregated: the scalar that is differentiated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trl_ext.algorithms.policy_losses import with_inputs
from trl_ext.algorithms.types import LossInputs, StepTokens, StepTotals, TokenLoss


@dataclass(frozen=True)
class Objective:
    """A policy loss, an aggregation and a KL estimator, called once per micro-batch.

    aggregate(w * policy_loss + beta * kl + divergence): the sampler weight w corrects the policy term only, as in TRL;
    the divergence is from a teacher.
    `kl_bias_correction` multiplies the KL by pi / pi_old, with gradient, which makes the gradient of k1 and k3 unbiased
    (DeepSeek-V3.2, arXiv:2512.02556, section 3.1); it is TRL's `use_bias_correction_kl`. For an estimator whose own
    gradient is the KL's (`kl_by_gradient`, such as k2) the ratio has no gradient (Tang and Munos, arXiv:2506.09477).
    `off_policy_threshold` is TRL's `off_policy_mask_threshold`, see `keeps_on_policy`.
    """

    policy_loss: Callable[..., TokenLoss]
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
        entropy: Tensor | None = None,
        group: Tensor | None = None,
        step: StepTokens | None = None,
        policy_mask: Tensor | None = None,
        divergence: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The micro-batch's part of the step's loss, and (B, T) quantities to average over unmasked tokens.

        Args:
            x: log-probabilities, advantages and mask.
            totals: counts over the whole optimizer step.
            ref_logp: (B, T) under the reference model; needed when beta is not 0.
            sampler_weight: (B, 1) or (B, T) from `sampler_correction`, or None for no correction.
            sampled_logp: (B, T) under the engine that sampled, NaN if unknown; None if that is `x.old_logp`.
            entropy, group, step: for a policy loss that asks for them.
            policy_mask: (B, T) bool, tokens with a policy loss (the KL penalty is on all), or None for all.
            divergence: (B, T) from a teacher, times its coefficient; on all tokens, and not weighted.

        Raises:
            ValueError: beta is not 0 and `ref_logp` is missing, or an input that the policy loss asks for.
        """
        # A masked token may have any log-probability; detached, its exp cannot make 0 * inf in the backward pass.
        x = dataclasses.replace(x, logp=torch.where(x.mask, x.logp, x.logp.detach()))
        sampled = x.old_logp if sampled_logp is None else sampled_logp
        known = torch.where(sampled.isnan(), x.old_logp, sampled)
        given = {"sampled_logp": known, "ref_logp": ref_logp, "entropy": entropy, "group": group, "step": step}
        token_loss = with_inputs(self.policy_loss, **given)(x)
        loss, metrics = token_loss.loss, {name: metric.detach() for name, metric in token_loss.metrics.items()}
        if self.off_policy_threshold is not None:
            loss = loss.masked_fill(~keeps_on_policy(x, sampled, self.off_policy_threshold), 0.0)
        if policy_mask is not None:
            loss = loss.masked_fill(~policy_mask, 0.0)
        if sampler_weight is not None:
            loss = loss * sampler_weight
            metrics["sampling/masked_frac"] = (sampler_weight == 0).float().expand_as(loss)
        if self.beta != 0:
            kl = self._kl(x, ref_logp)
            loss = loss + self.beta * kl
            metrics["kl"] = kl.detach()
        if divergence is not None:
            loss = loss + divergence
            metrics["distillation/divergence"] = divergence.detach()
        return self.aggregate(loss, x.mask, totals), metrics

    def _kl(self, x: LossInputs, ref_logp: Tensor | None) -> Tensor:
        if ref_logp is None:
            raise ValueError(f"beta is {self.beta:g}, so the objective needs ref_logp")
        kl = self.kl(x.logp, ref_logp)
        if not self.kl_bias_correction:
            return kl
        ratio = torch.exp(x.logp - x.old_logp)
        return kl * (ratio.detach() if self.kl_by_gradient else ratio)

    def ignores_zero_advantage_rows(self) -> bool:
        """Whether a step may skip rows with advantage 0: the loss declares it, and beta is 0."""
        return self.beta == 0 and getattr(self.policy_loss, "zero_advantage_is_noop", False)


def keeps_on_policy(x: LossInputs, sampled_logp: Tensor, threshold: float) -> Tensor:
    """(B, 1) bool: all sequences but those of negative advantage that are too far off-policy.

    Too far: the mean over tokens of log(pi_sampled / pi) exceeds `threshold`; a token without `sampled_logp` counts
    as 0. DeepSeek-V3.2 (arXiv:2512.02556), as in TRL.
    """
    log_ratio = (sampled_logp - x.logp.detach()).nan_to_num(nan=0.0)
    mean = (log_ratio * x.mask).sum(dim=1, keepdim=True) / x.mask.sum(dim=1, keepdim=True).clamp(min=1)
    return (x.advantage >= 0) | (mean <= threshold)
