"""Policy losses: `LossInputs` -> one loss per token, unreduced, with per-token metrics.

r is the ratio pi / pi_old of the sampled token, A its advantage, sg() stops the gradient. Every loss here has the
gradient -A grad(logp) at r = 1 (summed over the tokens of a sequence), so on-policy they all agree; only `clip_cov`
leaves tokens out there too.

A loss that needs more than `LossInputs` has one of these as a keyword-only parameter without default, and gets it:
`sampled_logp` (B, T), the log-probabilities under the engine that sampled, where these are not known `old_logp`;
`ref_logp` (B, T) under the reference model; `entropy` (B, T) of the policy; `group` (B,), equal for rows of one prompt;
`step`, the `StepTokens` of the whole optimizer step, which cost a forward pass more. None has a gradient. A loss with
`sampled_logp` corrects for the engine itself, so no sampler weight multiplies it.

Letters: B rows of a micro-batch, T completion tokens, N tokens of the optimizer step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from trl_ext.algorithms.types import LossInputs, StepTokens, TokenLoss
from trl_ext.registry import Registry


def _fault(loss: Callable[[LossInputs], TokenLoss], rows: int) -> str | None:
    logp = torch.full((rows, 3), -1.0, requires_grad=True)  # (B, T)
    x = LossInputs(logp, logp.detach(), torch.ones(rows, 1), torch.ones(rows, 3, dtype=torch.bool))
    loss = _on_policy(loss, x)
    token_loss = loss(x)
    if not isinstance(token_loss, TokenLoss):
        return f"must return TokenLoss(loss, metrics) from trl_ext, got {type(token_loss).__name__}"
    misshapen = [
        name for name, value in {"its loss": token_loss.loss, **token_loss.metrics}.items() if value.shape != logp.shape
    ]
    if misshapen:
        return f"must return one value per token, (B, T): {', '.join(misshapen)} has another shape"
    if getattr(loss, "zero_advantage_is_noop", False) and (found_not_0 := _not_0_at_zero_advantage(loss, x)):
        return (
            f"declares zero_advantage_is_noop, and at advantage 0 not 0: {', '.join(found_not_0)}. Multiply by "
            "(x.advantage != 0), or register it without zero_advantage_is_noop"
        )
    return None


def _on_policy(loss: Callable[..., TokenLoss], x: LossInputs) -> Callable[[LossInputs], TokenLoss]:
    old, rows = x.old_logp, torch.zeros(x.logp.shape[0])
    step = StepTokens.of(x)
    return with_inputs(loss, sampled_logp=old, ref_logp=old, entropy=-old, group=rows, step=step)


def is_reinforce_on_policy(loss: Callable[..., TokenLoss]) -> bool:
    """Whether at pi = pi_old a token's gradient is that of `reinforce`, -A, on an example."""
    x = _example(torch.tensor([[2.0], [-1.0]]))
    gradient = _gradient(_on_policy(loss, x), x)
    return torch.allclose(gradient, -x.advantage.expand_as(gradient))


def has_ratio_to_old(loss: Callable[..., TokenLoss]) -> bool:
    """Whether a token's gradient is another one with another `old_logp`, on an example."""
    x = _example(torch.tensor([[2.0], [-1.0]]))
    bound = _on_policy(loss, x)
    return not torch.equal(_gradient(bound, x), _gradient(bound, dataclasses.replace(x, old_logp=x.old_logp - 0.1)))


def keeps_advantages_of_tokens(loss: Callable[..., TokenLoss]) -> bool:
    """Whether at pi = pi_old a token's gradient is by its own advantage, and not by the mean of its response's."""
    x = _example(torch.tensor([[2.0, -1.0, 0.5], [-1.0, 3.0, 0.25]]))
    gradient = _gradient(_on_policy(loss, x), x)
    return torch.allclose(gradient, torch.where(gradient == 0, 0.0, -x.advantage))  # some losses leave tokens out


def _example(advantage: Tensor) -> LossInputs:
    logp = torch.tensor([[-0.1, -1.0, -3.0], [-2.0, -0.5, -0.2]], requires_grad=True)  # (B, T)
    return LossInputs(logp, logp.detach(), advantage, torch.ones(2, 3, dtype=torch.bool))


def _gradient(loss: Callable[[LossInputs], TokenLoss], x: LossInputs) -> Tensor:
    """(B, T) of the sum over tokens, with respect to their log-probabilities."""
    (gradient,) = torch.autograd.grad(loss(x).loss.sum(), x.logp, allow_unused=True, materialize_grads=True)
    return gradient


def with_inputs(
    loss: Callable[..., TokenLoss], **available: Tensor | StepTokens | None
) -> Callable[[LossInputs], TokenLoss]:
    """The loss with the inputs bound that it asks for.

    Raises:
        ValueError: an input is not available.
    """
    asked = {name: available.get(name) for name in POLICY_LOSSES.inputs_of(loss)}
    missing = [name for name, value in asked.items() if value is None]
    if missing:
        raise ValueError(f"the policy loss needs {' and '.join(missing)}")
    return functools.update_wrapper(functools.partial(loss, **asked), loss) if asked else loss


def _not_0_at_zero_advantage(loss: Callable[[LossInputs], TokenLoss], x: LossInputs) -> list[str]:
    """What of a loss is not 0 on rows whose advantage is, on either side of the policy that sampled and far from it."""
    found = dict[str, None]()  # in order
    for distance in (0.5, -0.5, 0.0, 20.0, -20.0):
        logp, old = x.logp + min(distance, 0.0), x.old_logp - max(distance, 0.0)  # no probability is above 1
        away = dataclasses.replace(x, logp=logp, old_logp=old, advantage=torch.zeros_like(x.advantage))
        found |= dict.fromkeys(_not_0(loss, away))
    return list(found)


def _not_0(loss: Callable[[LossInputs], TokenLoss], x: LossInputs) -> list[str]:
    token_loss = loss(x)
    values = {"its loss": token_loss.loss}
    if token_loss.loss.requires_grad:
        (gradient,) = torch.autograd.grad(token_loss.loss.sum(), x.logp, allow_unused=True, materialize_grads=True)
        values["its gradient"] = gradient
    values |= {f"its metric {name!r}": metric for name, metric in token_loss.metrics.items()}
    return [name for name, value in values.items() if value.any()]


# zero_advantage_is_noop: at advantage 0, the loss, its gradient and the metrics are 0, so an optimizer step may skip
# the row.
POLICY_LOSSES = Registry(
    "policy loss",
    _fault,
    properties=["zero_advantage_is_noop"],
    inputs=["sampled_logp", "ref_logp", "entropy", "group", "step"],
)


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
    is the paper's objective; with `constant` and normalize_constant 1 it is LUSPO's (arXiv:2602.05261, eq. 7).
    """
    ratio = torch.exp(_sequence_mean(x.logp - x.old_logp, x.mask)).expand_as(x.logp)  # (B, T)
    return TokenLoss(*_clipped(ratio, x.advantage, eps_low, eps_high, None))


@POLICY_LOSSES.register(zero_advantage_is_noop=True)
def gspo_token(x: LossInputs, *, eps_low: float = 3e-4, eps_high: float = 4e-4) -> TokenLoss:
    """`ppo_clip` on sg(s) pi / sg(pi): the value of GSPO's sequence ratio s, and each token's own gradient.

    GSPO-token (arXiv:2507.18071, section 4.3), for an advantage per token. With one per sequence and `sequence_mean`
    its gradient is that of `gspo`.
    """
    ratio = torch.exp(_sequence_mean(x.logp - x.old_logp, x.mask)).detach() * torch.exp(x.logp - x.logp.detach())
    return TokenLoss(*_clipped(ratio, x.advantage, eps_low, eps_high, None))


@POLICY_LOSSES.register(zero_advantage_is_noop=True)
def gmpo(x: LossInputs, *, eps_low: float = 0.4, eps_high: float = 0.4) -> TokenLoss:
    """-(geometric mean of the ratios) A, each ratio first bounded to exp(-eps_low) .. exp(eps_high) as PPO does.

    GMPO (arXiv:2507.20673, eq. 4 and algorithm 1): bounded above where A > 0, below where A < 0. All tokens have the
    same value; with `sequence_mean` the aggregate is the paper's objective.
    """
    log_ratio = x.logp - x.old_logp
    bounded = torch.where(x.advantage > 0, log_ratio.clamp(max=eps_high), log_ratio.clamp(min=-eps_low))
    ratio = torch.exp(_sequence_mean(bounded, x.mask))
    return TokenLoss(
        (-ratio * x.advantage).expand_as(x.logp),
        _clip_metrics(log_ratio < -eps_low, log_ratio > eps_high, x.advantage),
    )


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
    temperature = _choose(x.advantage > 0, temperature_pos, temperature_neg, ratio)
    return TokenLoss(-torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * x.advantage)


@POLICY_LOSSES.register(zero_advantage_is_noop=True)
def ce_gppo(
    x: LossInputs, *, eps_low: float = 0.2, eps_high: float = 0.2, beta1: float = 0.75, beta2: float = 1.0,
    dual_clip: float | None = None,
) -> TokenLoss:  # fmt: skip
    """`ppo_clip` whose clipped tokens keep a gradient: beta1 (1 - eps_low) A below, beta2 (1 + eps_high) A above.

    CE-GPPO (arXiv:2509.20712, eq. 8-10; beta1 and beta2 of its table 1). beta1 = beta2 = 1 is GPPO (arXiv:2508.07629),
    0 is `ppo_clip`. Its authors' code has the `dual_clip` of `ppo_clip` too, at 3.
    """
    ratio = torch.exp(x.logp - x.old_logp)
    low, high = (ratio < 1 - eps_low) & (x.advantage < 0), (ratio > 1 + eps_high) & (x.advantage > 0)
    bound = _choose(low, beta1 * (1 - eps_low), beta2 * (1 + eps_high), ratio)
    kept = torch.where(low | high, bound * torch.exp(x.logp - x.logp.detach()), ratio)
    if dual_clip is not None:
        kept = torch.where(x.advantage < 0, kept.clamp(max=dual_clip), kept)
    return TokenLoss(-kept * x.advantage, _clip_metrics(low, high, x.advantage))


@POLICY_LOSSES.register(zero_advantage_is_noop=True)
def aspo(x: LossInputs, *, eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = 3.0) -> TokenLoss:
    """`ppo_clip` with the weight 1 / r in place of r where A > 0, so that tokens that lag behind get more of it.

    ASPO (arXiv:2510.06062, section 6 and eq. 3): the same tokens lose their gradient as with PPO, and a weight above
    `dual_clip` is cut to it, with gradient, on both sides. The paper gives no number for it; 3 is that of its scripts.
    """
    ratio = torch.exp(x.logp - x.old_logp)
    low, high = (ratio < 1 - eps_low) & (x.advantage < 0), (ratio > 1 + eps_high) & (x.advantage > 0)
    weight = torch.where(x.advantage > 0, 1 / ratio, ratio).detach()
    weight = weight if dual_clip is None else weight.clamp(max=dual_clip)
    weight = weight * torch.exp(x.logp - x.logp.detach())  # the same number, with the gradient of log pi
    return TokenLoss(-weight.masked_fill(low | high, 0.0) * x.advantage, _clip_metrics(low, high, x.advantage))


@POLICY_LOSSES.register(zero_advantage_is_noop=True)
def vespo(
    x: LossInputs, *, sampled_logp: Tensor, k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> TokenLoss:  # fmt: skip
    """-phi(W) A log pi with phi(W) = W^k exp(lambda (1 - W)), without gradient; W = pi / pi_sampled of the sequence.

    VESPO (arXiv:2602.10693, eq. 20; k and lambda, its c1 and c2, by the advantage's sign). The same for all tokens.
    """
    log_ratio = torch.where(x.mask, x.logp.detach() - sampled_logp, 0.0).sum(dim=1, keepdim=True)  # (B, 1)
    is_good = x.advantage >= 0
    k, decay = (_choose(is_good, *pair, x.logp) for pair in ((k_pos, k_neg), (lambda_pos, lambda_neg)))
    weight = torch.exp(k * log_ratio + decay * (1 - log_ratio.exp()))
    metrics = {"vespo/weight": (weight * (x.advantage != 0)).expand_as(x.logp)}
    return TokenLoss(-weight * x.advantage * x.logp, metrics)


@POLICY_LOSSES.register(zero_advantage_is_noop=True)
def dppo_tv(x: LossInputs, *, sampled_logp: Tensor, delta: float = 0.2) -> TokenLoss:
    """-M r A with r = pi / pi_sampled, and M = 0 where the sampled token's probability moved away by more than `delta`.

    DPPO with the binary total variation |pi_sampled - pi| (arXiv:2602.04879, eq. 12 and 13). Away: up where A > 0, down
    where A < 0. verl's `dppo_tv` also truncates r, which the paper advises against in section 5.4.
    """
    divergence = (sampled_logp.exp() - x.logp.detach().exp()).abs()
    return _within(divergence <= delta, x, sampled_logp)


@POLICY_LOSSES.register(zero_advantage_is_noop=True)
def dppo_kl(x: LossInputs, *, sampled_logp: Tensor, delta: float = 0.05) -> TokenLoss:
    """`dppo_tv` with the Kullback-Leibler divergence of two outcomes, the sampled token and any other.

    DPPO (arXiv:2602.04879, eq. 12 and 14).
    """
    sampled, policy = sampled_logp.exp(), x.logp.detach().exp()
    other = torch.xlogy(1 - sampled, (1 - sampled) / (1 - policy).clamp(min=torch.finfo(policy.dtype).tiny))
    return _within(sampled * (sampled_logp - x.logp.detach()) + other <= delta, x, sampled_logp)


@POLICY_LOSSES.register
def kl_cov(x: LossInputs, *, step: StepTokens, fraction: float = 0.002, kl_coef: float = 1.0) -> TokenLoss:
    """-r A, and kl_coef |log r| on the `fraction` of the step's tokens with the greatest covariance, at least one.

    KL-Cov (arXiv:2505.22617, section 4.2; fraction and kl_coef for 7B). A token's covariance is (log pi - mean log pi)
    (A - mean A), the means over the tokens of the step; |log r| is its authors' estimate of KL(pi_old || pi), whose
    gradient at r = 1 is 0. verl takes the tokens of a micro-batch instead.
    """
    covariance, log_ratio = _covariance(step), x.logp - x.old_logp
    places = covariance.topk(min(len(covariance), max(int(fraction * len(covariance)), 1))).indices
    chosen = step.of_micro_batch(torch.zeros_like(covariance).index_fill(0, places, 1.0))
    loss = -torch.exp(log_ratio) * x.advantage + kl_coef * chosen * log_ratio.abs()
    return TokenLoss(loss, {"kl_cov/penalized": chosen})


@POLICY_LOSSES.register
def clip_cov(
    x: LossInputs, *, step: StepTokens, fraction: float = 2e-4, low: float = 1.0, high: float = 5.0,
    eps_low: float = 0.2, eps_high: float = 0.2,
) -> TokenLoss:  # fmt: skip
    """`ppo_clip`, 0 on a `fraction` of the step's tokens, at least one, whose covariance (`kl_cov`) is in low .. high.

    Clip-Cov (arXiv:2505.22617, section 4.2), which draws the tokens at random from those in the range that PPO does not
    clip; here by a generator seeded with N, so that a step can be repeated. verl takes the tokens of a micro-batch.
    """
    covariance, ratio = _covariance(step), torch.exp(step.logp - step.old_logp)
    is_clipped = torch.where(step.advantage > 0, ratio > 1 + eps_high, ratio < 1 - eps_low) & (step.advantage != 0)
    places = ((covariance > low) & (covariance < high) & ~is_clipped).nonzero()[:, 0]
    drawn = torch.rand(len(covariance), generator=torch.Generator().manual_seed(len(covariance)))  # on any device
    count = min(len(places), max(int(fraction * len(covariance)), 1))
    chosen = places[drawn.to(places.device)[places].topk(count).indices]
    kept = 1 - step.of_micro_batch(torch.zeros_like(covariance).index_fill(0, chosen, 1.0))
    loss, metrics = _clipped(torch.exp(x.logp - x.old_logp), x.advantage, eps_low, eps_high, None)
    return TokenLoss(loss * kept, {**metrics, "clip_cov/clipped": 1 - kept})


@POLICY_LOSSES.register
def bapo(
    x: LossInputs, *, step: StepTokens, positive: float = 0.5, low: float = 0.6, low_max: float = 0.9,
    high: float = 1.2, high_max: float = 3.0, delta: float = 0.05,
) -> TokenLoss:  # fmt: skip
    """-min(r A, clip(r, c_low, c_high) A), the bounds as wide as the tokens with A > 0 need for their share.

    BAPO (arXiv:2510.18927): from `low` and `high`, the upper bound is raised by `delta` up to high_max, then the lower
    one up to low_max, until tokens with A > 0 are `positive` of the sum over the step of |min(r A, clip(r) A)|. Bounds
    and share of its authors' repository, whose code raises the lower bound first and has a dual clip.
    """
    if delta <= 0:
        raise ValueError(f"bapo needs delta > 0 to widen its bounds, got {delta:g}")
    ratio, c_low, c_high = torch.exp(step.logp - step.old_logp), low, high

    def is_short() -> bool:
        gain = torch.where(step.advantage > 0, ratio.clamp(max=c_high), ratio.clamp(min=c_low)) * step.advantage
        return bool(gain.clamp(min=0).sum() < positive * gain.abs().sum())

    while is_short() and (c_high < high_max or c_low < low_max):
        if c_high < high_max:
            c_high = min(round(c_high + delta, 9), high_max)
        else:
            c_low = min(round(c_low + delta, 9), low_max)
    loss, metrics = _clipped(torch.exp(x.logp - x.old_logp), x.advantage, 1 - c_low, c_high - 1, None)
    bounds = {name: torch.full_like(x.old_logp, value) for name, value in {"low": c_low, "high": c_high}.items()}
    return TokenLoss(loss, {**metrics, **{f"bapo/{name}": value for name, value in bounds.items()}})


def _covariance(step: StepTokens) -> Tensor:
    """(N,) products of a token's log-probability and its advantage, each less its mean over the step."""
    return (step.logp - step.logp.mean()) * (step.advantage - step.advantage.mean())


def _within(close: Tensor, x: LossInputs, sampled_logp: Tensor) -> TokenLoss:
    """-r A on tokens inside a trust region around the sampler, or on their way back into it."""
    ratio = torch.exp(x.logp - sampled_logp)
    low, high = ~close & (ratio < 1) & (x.advantage < 0), ~close & (ratio > 1) & (x.advantage > 0)
    return TokenLoss(-ratio.masked_fill(low | high, 0.0) * x.advantage, _clip_metrics(low, high, x.advantage))


def _choose(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """`torch.where` of two numbers, in the precision of `like`."""
    return torch.where(condition, like.new_tensor(yes), like.new_tensor(no))


def _sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """(B, 1): means over unmasked tokens; 0 for a sequence without."""
    return torch.where(mask, values, 0.0).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def _clipped(
    ratio: Tensor, advantage: Tensor, eps_low: float, eps_high: float, dual_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high)
    unclipped = ratio if dual_clip is None else ratio.clamp(max=dual_clip)
    loss = -torch.minimum(unclipped * advantage, clipped * advantage)
    return loss, _clip_metrics(ratio < 1 - eps_low, ratio > 1 + eps_high, advantage)


def _clip_metrics(below: Tensor, above: Tensor, advantage: Tensor) -> dict[str, Tensor]:
    """TRL's metrics: tokens without gradient because their ratio is below, or above, a bound."""
    low, high = ((below & (advantage < 0)).float(), (above & (advantage > 0)).float())
    return {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
