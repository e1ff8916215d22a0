"""Rewards to advantages, (P, G) -> (P, G), one row per prompt.

A reward of NaN marks a completion that no reward function scored: it is excluded from every statistic, and its
advantage is NaN, which `for_training` turns into 0. An infinite reward makes its group's advantages NaN. Members that
compare within a group raise ValueError for fewer than 2 completions per prompt.

Letters: P prompts, G completions per prompt.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trl_ext.registry import Registry


def _fault(advantage: Callable[[Tensor], Tensor], group_size: int) -> str | None:
    reward = torch.zeros(2, group_size)  # (P, G)
    reward[0, 0] = reward[:, -1] = 1.0
    found = advantage(reward)
    if not isinstance(found, Tensor):
        return f"must return a tensor (P, G), got {type(found).__name__}"
    if found.shape != reward.shape:
        return f"must return (P, G), here (2, {group_size}), got {tuple(found.shape)}"
    return None


ADVANTAGES = Registry("advantage", _fault)


def total_reward(per_func: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of the rewards of F functions: (N, F), (F,) -> (N,).

    NaN only where no function scored the completion; infinite where a reward with a nonzero weight is.
    """
    total = (per_func * weights).nansum(dim=1)
    total = total.masked_fill(total.isnan(), torch.inf)  # of +inf and -inf
    return total.masked_fill(per_func.isnan().all(dim=1), torch.nan)


def for_training(advantage: Tensor, reward: Tensor) -> Tensor:
    """(P, G) advantages for the loss: 0 for unscored completions, NaN in a group with an infinite reward.

    NaN reaches the gradient, so that the optimizer step is skipped.
    """
    infinite = reward.isinf().any(dim=1, keepdim=True)
    return advantage.masked_fill(infinite, torch.nan).masked_fill(reward.isnan(), 0.0)


def _group_mean(reward: Tensor) -> Tensor:
    return reward.nanmean(dim=1, keepdim=True)  # (P, 1)


def _nan_std(reward: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Standard deviation with Bessel's correction, ignoring NaN; 0 of one value, NaN if a value is infinite."""
    count = (~reward.isnan()).sum(dim=dim, keepdim=True)
    deviation = reward - reward.nanmean(dim=dim, keepdim=True)
    std = (deviation.square().nansum(dim=dim, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return std.masked_fill(reward.isinf().any(dim=dim, keepdim=True), torch.nan)


def _need_group(reward: Tensor, name: str) -> int:
    if reward.ndim != 2:
        raise ValueError(f"{name} needs rewards of shape (P, G), got {tuple(reward.shape)}")
    if reward.shape[1] < 2:
        raise ValueError(f"{name} needs at least 2 completions per prompt, got {reward.shape[1]}")
    return reward.shape[1]


@ADVANTAGES.register
def raw(reward: Tensor) -> Tensor:
    """A_i = r_i: no baseline. REINFORCE (Williams 1992, doi:10.1007/BF00992696)."""
    return reward.clone()


@ADVANTAGES.register
def group_mean(reward: Tensor) -> Tensor:
    """A_i = r_i - mean(r) over the group, not divided by the standard deviation.

    Dr. GRPO (arXiv:2503.20783): dividing by the standard deviation gives more weight to too easy and too hard prompts.
    """
    best = reward.nan_to_num(nan=-torch.inf).amax(dim=1, keepdim=True)
    shifted = reward - best  # makes equal rewards give exactly 0, without the rounding of their mean
    return shifted - _group_mean(shifted)


@ADVANTAGES.register
def group_std(reward: Tensor, *, eps: float = 1e-6) -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + eps) over the group, std with Bessel's correction.

    GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1.2). `eps` is 1e-6 in the course handout and 1e-4 in TRL.
    """
    _need_group(reward, "group_std")
    return group_mean(reward) / (_nan_std(reward, dim=1) + eps)


@ADVANTAGES.register
def batch_std(reward: Tensor, *, eps: float = 1e-6) -> Tensor:
    """A_i = (r_i - mean of its group) / (std over all P*G rewards + eps).

    Baseline per group, scale per batch: TRL's `scale_rewards="batch"`, after "Tricks or Traps?" (arXiv:2508.08221).
    """
    _need_group(reward, "batch_std")
    return group_mean(reward) / (_nan_std(reward, dim=(0, 1)) + eps)


def normalize_then_sum(rewards: Tensor, weights: Tensor, *, eps: float = 1e-4) -> Tensor:
    """(P, G, K) rewards of K functions -> (P, G): the weighted sum of each, normalized in its group like `group_std`.

    GDPO (arXiv:2601.05242), TRL's `multi_objective_aggregation="normalize_then_sum"`, which then takes `batch_std`:
    every group's mean is already 0. A completion that one function did not score has the sum of the others.
    """
    deviation = rewards - rewards.nanmean(dim=1, keepdim=True)
    normalized = deviation / (_nan_std(rewards, dim=1) + eps) * weights
    return normalized.nansum(dim=2).masked_fill(rewards.isnan().all(dim=2), torch.nan)


@ADVANTAGES.register
def leave_one_out(reward: Tensor) -> Tensor:
    """A_i = r_i - mean of the other rewards of the group. RLOO (arXiv:2402.14740)."""
    _need_group(reward, "leave_one_out")
    scored = (~reward.isnan()).sum(dim=1, keepdim=True)  # (P, 1)
    return group_mean(reward) * scored / (scored - 1).clamp(min=1)


@ADVANTAGES.register
def max_rl(reward: Tensor, *, eps: float = 1e-6) -> Tensor:
    """A_i = (r_i - mean(r)) / (mean(r) + eps); zero in a group without reward.

    Dividing by the mean makes the expected update a truncated maximum-likelihood gradient of the success
    probability, so that rarely solved prompts get more weight. MaxRL (arXiv:2602.02710). Rewards must not be negative.
    """
    _need_group(reward, "max_rl")
    if (reward < 0).any():
        raise ValueError(f"max_rl needs rewards >= 0, got {reward[reward < 0].min().item():g}")
    return group_mean(reward) / (_group_mean(reward) + eps)


@ADVANTAGES.register
def pass_at_k(reward: Tensor, *, k: int = 4, threshold: float = 0.5, eps: float = 1e-6) -> Tensor:
    """Advantage of a completion when the group is rewarded for solving the prompt in any of k draws, 1 <= k <= G.

    With n completions of which w are incorrect, pass@k is R = 1 - C(w, k) / C(n, k), its standard deviation
    s = sqrt(R (1 - R)); a correct completion gets (1 - R) / s, an incorrect one
    (1 - R - C(w-1, k-1) / C(n-1, k-1)) / s. Pass@k training (arXiv:2508.10751, analytical derivation).
    A completion is correct when its reward exceeds `threshold`.
    """
    group = _need_group(reward, "pass_at_k")
    if not 1 <= k <= group:
        raise ValueError(f"pass_at_k needs 1 <= k <= {group} completions per prompt, got k={k}")
    scored = ~reward.isnan()
    correct = (reward > threshold) & scored
    total = scored.sum(dim=1, keepdim=True).to(reward.dtype)  # (P, 1)
    incorrect = total - correct.sum(dim=1, keepdim=True)
    fail = _choose_ratio(incorrect, total, k)  # probability that k draws without replacement are all incorrect
    others_fail = _choose_ratio(incorrect - 1, total - 1, k - 1)  # of k-1 draws in addition to an incorrect one
    std = (fail * (1 - fail)).sqrt()
    advantage = torch.where(correct, fail, fail - others_fail) / (std + eps)
    return torch.where(scored, advantage * (std > 0), torch.nan)


def _choose_ratio(w: Tensor, n: Tensor, k: int) -> Tensor:
    """C(w, k) / C(n, k) as a product, 0 where w < k."""
    ratio = torch.ones_like(w)
    for i in range(k):
        ratio = ratio * (w - i).clamp(min=0) / (n - i).clamp(min=1)
    return ratio
