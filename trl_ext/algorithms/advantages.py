"""Rewards to advantages, (P, G) -> (P, G), or (P, G, T) for an advantage per token; one row per prompt.

A reward of NaN marks a completion that no reward function scored: it is excluded from every statistic, and its
advantage is NaN, which `for_training` turns into 0. An infinite reward makes its group's advantages NaN. Members that
compare within a group raise ValueError for fewer than 2 completions per prompt.

A member that needs more than the total reward has one of these as a keyword-only parameter without default, and gets
it: `rewards` (P, G, K) of each reward function, with their `weights` (K,); `lengths` (P, G) in tokens; `truncated` and
`correct` (P, G), the second NaN where neither is known; `turn_lengths` and `turn_rewards` (P, G, S), tokens of each of
the model's turns, 0 after the last, and what an environment gave for it; one turn where there are no tools.

Letters: P prompts, G completions per prompt, K reward functions, S turns, T tokens of the longest completion.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from trl_ext.registry import Registry


def _fault(advantage: Callable[..., Tensor], group_size: int) -> str | None:
    reward = torch.zeros(2, group_size)  # (P, G)
    reward[0, 0] = reward[:, -1] = 1.0
    inputs = {
        "rewards": reward[:, :, None], "weights": torch.ones(1), "lengths": torch.full_like(reward, 3.0),
        "truncated": torch.zeros_like(reward), "correct": reward,
        "turn_lengths": torch.tensor([1, 2]).expand(2, group_size, 2), "turn_rewards": torch.zeros(2, group_size, 2),
    }  # fmt: skip
    values = advantage(reward, **{name: inputs[name] for name in ADVANTAGES.inputs_of(advantage)})
    if not isinstance(values, Tensor):
        return f"must return a tensor (P, G) or (P, G, T), got {type(values).__name__}"
    if values.shape not in (reward.shape, (*reward.shape, 3)):
        return (
            f"must return (P, G), here (2, {group_size}), or (P, G, T), here (2, {group_size}, 3), "
            f"got {tuple(values.shape)}"
        )
    return None


ADVANTAGES = Registry(
    "advantage",
    _fault,
    inputs=["rewards", "weights", "lengths", "truncated", "correct", "turn_lengths", "turn_rewards"],
)


def total_reward(per_func: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of the rewards of K functions: (N, K), (K,) -> (N,).

    NaN only where no function scored the completion; infinite where a reward with a nonzero weight is.
    """
    total = (per_func * weights).nansum(dim=1)
    total = total.masked_fill(total.isnan(), torch.inf)  # of +inf and -inf
    return total.masked_fill(per_func.isnan().all(dim=1), torch.nan)


def for_training(advantage: Tensor, reward: Tensor) -> Tensor:
    """Advantages for the loss: 0 for unscored completions, NaN in a group with an infinite reward.

    NaN reaches the gradient, so that the optimizer step is skipped.

    Args:
        advantage: (P, G) or (P, G, T).
        reward: (P, G)
    """
    infinite, unscored = reward.isinf().any(dim=1, keepdim=True), reward.isnan()
    if advantage.ndim == 3:
        infinite, unscored = infinite[:, :, None], unscored[:, :, None]
    return advantage.masked_fill(infinite, torch.nan).masked_fill(unscored, 0.0)


def _group_mean(reward: Tensor) -> Tensor:
    return reward.nanmean(dim=1, keepdim=True)  # (P, 1)


def _nan_std(reward: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Standard deviation with Bessel's correction, ignoring NaN; 0 of one value, NaN if a value is infinite."""
    count = (~reward.isnan()).sum(dim=dim, keepdim=True)
    deviation = reward - reward.nanmean(dim=dim, keepdim=True)
    std = (deviation.square().nansum(dim=dim, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return std.masked_fill(reward.isinf().any(dim=dim, keepdim=True), torch.nan)


def _over_batch_std(advantage: Tensor, reward: Tensor, eps: float) -> Tensor:
    """Advantages divided by their standard deviation over the batch; NaN if a reward is infinite."""
    scale = _nan_std(advantage, dim=(0, 1)) + eps
    return advantage / scale.masked_fill(reward.isinf().any(), torch.nan)


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
def zero(reward: Tensor) -> Tensor:
    """A_i = 0: rewards are measured only, and what is learned is a teacher's or the KL penalty's."""
    return torch.zeros_like(reward).masked_fill(reward.isnan(), torch.nan)


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


@ADVANTAGES.register
def gdpo(reward: Tensor, *, rewards: Tensor, weights: Tensor, eps: float = 1e-6) -> Tensor:
    """Each reward function's rewards normalized like `group_std`, their weighted sum normalized over the batch.

    GDPO (arXiv:2601.05242); TRL's `multi_objective_aggregation="normalize_then_sum"`, with eps 1e-4. A completion that
    one function did not score has the sum of the others.
    """
    _need_group(reward, "gdpo")
    deviation = rewards - rewards.nanmean(dim=1, keepdim=True)
    normalized = deviation / (_nan_std(rewards, dim=1) + eps) * weights
    total = normalized.nansum(dim=2).masked_fill(rewards.isnan().all(dim=2), torch.nan)
    return _over_batch_std(group_mean(total), reward, eps)


@ADVANTAGES.register
def reinforce_plus_plus(reward: Tensor, *, eps: float = 1e-6) -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + eps) over all P*G rewards, without a baseline per group.

    REINFORCE++ (arXiv:2501.03262, eq. 5), whose KL penalty in the reward is `beta` here. verl takes the statistics over
    tokens, which gives long responses more weight in them.
    """
    best = reward.nan_to_num(nan=-torch.inf).amax()
    shifted = reward - best  # makes equal rewards give exactly 0
    return (shifted - shifted.nanmean()) / (_nan_std(reward, dim=(0, 1)) + eps)


@ADVANTAGES.register
def reinforce_plus_plus_baseline(reward: Tensor, *, eps: float = 1e-6) -> Tensor:
    """A_i = A'_i / (std(A') + eps) over the batch, where A'_i = r_i - mean of its group.

    REINFORCE++ with baseline (arXiv:2501.03262, eq. 6 and 7; the batch mean of A' is 0 by construction). `batch_std`
    divides by the standard deviation of the rewards instead.
    """
    _need_group(reward, "reinforce_plus_plus_baseline")
    return _over_batch_std(group_mean(reward), reward, eps)


@ADVANTAGES.register
def opo(reward: Tensor, *, lengths: Tensor) -> Tensor:
    """A_i = r_i - sum(l r) / sum(l) over the group, l the lengths in tokens: the baseline of least variance.

    OPO (arXiv:2505.23585), under its assumption that the gradient's squared norm grows with the length.
    """
    _need_group(reward, "opo")
    best = reward.nan_to_num(nan=-torch.inf).amax(dim=1, keepdim=True)
    shifted, weight = reward - best, lengths.to(reward.dtype).masked_fill(reward.isnan(), 0.0)
    return shifted - (weight * shifted).nansum(dim=1, keepdim=True) / weight.sum(dim=1, keepdim=True).clamp(min=1)


@ADVANTAGES.register
def length_reward(reward: Tensor, *, lengths: Tensor, correct: Tensor, weight: float = 1.0) -> Tensor:
    """A_i = R_i - mean(R), R_i = r_i + weight L_i with L_i = 1/2 - (l_i - min l) / (max l - min l), l in tokens.

    The length reward of Kimi k1.5 (arXiv:2501.12599, section 2.3.3): L_i is at most 0 unless the completion is correct,
    and 0 where all of a group are equally long. Groups that are solved by all completions have advantages too.
    """
    _need_group(reward, "length_reward")
    unscored = reward.isnan()
    least = lengths.masked_fill(unscored, torch.inf).amin(dim=1, keepdim=True)
    span = lengths.masked_fill(unscored, -torch.inf).amax(dim=1, keepdim=True) - least
    bonus = torch.where(span > 0, 0.5 - (lengths - least) / span, 0.0).to(reward.dtype)
    return group_mean(reward + weight * torch.where(correct == 1, bonus, bonus.clamp(max=0)))


@ADVANTAGES.register
def w_reinforce(reward: Tensor, *, positive_weight: float = 0.1, threshold: float = 0.5) -> Tensor:
    """A_i = positive_weight for a correct completion, -1 for an incorrect one: mostly negative reinforcement.

    Weighted-REINFORCE (arXiv:2506.01347, section 5; lambda 0.1). A completion is correct when its reward exceeds
    `threshold`.
    """
    signed = torch.where(reward > threshold, reward.new_tensor(positive_weight), reward.new_tensor(-1.0))
    return signed.masked_fill(reward.isnan(), torch.nan)


@ADVANTAGES.register
def discounted(reward: Tensor, *, lengths: Tensor, gamma: float = 0.99) -> Tensor:
    """(P, G, T): A_it = gamma^(l_i - t) (r_i - mean of the group) for t = 1 .. l_i, 0 after the last token.

    The discounted return of a reward at the last token (Sutton and Barto, Reinforcement Learning, 2nd ed., eq. 3.8):
    tokens near the answer get more of it. gamma = 1 is `group_mean`.
    """
    _need_group(reward, "discounted")
    left = lengths[:, :, None] - torch.arange(1, int(lengths.max()) + 1, device=reward.device)  # (P, G, T) tokens
    decay = torch.where(left >= 0, gamma ** left.clamp(min=0).to(reward.dtype), 0.0)
    return decay * group_mean(reward)[:, :, None]


@ADVANTAGES.register
def turn_returns(reward: Tensor, *, turn_lengths: Tensor, turn_rewards: Tensor, eps: float = 1e-6) -> Tensor:
    """(P, G, T): A_it = the sum of s_ij over the turn j of token t and those after it, s = (r - mean) / (std + eps).

    r_ij is what an environment gave for turn j, and in the last turn also the total reward; mean and std are over all
    turns of the group. Process supervision of GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1.3): steps are turns.
    """
    _need_group(reward, "turn_returns")
    exists = turn_lengths > 0
    last = exists & (exists.cumsum(dim=2) == exists.sum(dim=2, keepdim=True))
    rewards = torch.where(last, turn_rewards + reward[:, :, None], turn_rewards).masked_fill(~exists, torch.nan)
    rewards = rewards.masked_fill(reward.isnan()[:, :, None], torch.nan).to(reward.dtype)
    mean, std = rewards.nanmean(dim=(1, 2), keepdim=True), _nan_std(rewards, dim=(1, 2))
    standardized = ((rewards - mean) / (std + eps)).nan_to_num(0.0)
    returns = torch.nn.functional.pad(standardized.flip(2).cumsum(dim=2).flip(2), (0, 1))  # 0 after the last turn
    ends = turn_lengths.cumsum(dim=2)
    token = torch.arange(int(ends.max()), device=reward.device)
    turn = (token[None, None, :, None] >= ends[:, :, None, :]).sum(dim=3)  # (P, G, T)
    return returns.gather(2, turn)


@ADVANTAGES.register
def leave_one_out(reward: Tensor) -> Tensor:
    """A_i = r_i - mean of the other rewards of the group. RLOO (arXiv:2402.14740)."""
    _need_group(reward, "leave_one_out")
    scored = (~reward.isnan()).sum(dim=1, keepdim=True)  # (P, 1)
    return group_mean(reward) * scored / (scored - 1).clamp(min=1)


@ADVANTAGES.register
def max_rl(reward: Tensor, *, eps: float = 1e-6) -> Tensor:
    """A_i = (r_i - mean(r)) / (mean(r) + eps); zero in a group without reward.

    Dividing by the mean makes the expected update a maximum-likelihood gradient of the success probability, truncated
    at order G - 1, so that rarely solved prompts get more weight. MaxRL (arXiv:2602.02710). Rewards must not be
    negative.
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


@ADVANTAGES.register
def pkpo(reward: Tensor, *, k: int = 4) -> Tensor:
    """s_i = mean over all k-sets of the group, counted where i is in the set, of max(set) - max(set without i).

    PKPO (arXiv:2505.15201, eq. 33, `sloo_minus_one`): its gradient is that of the expected best reward of k draws, for
    any real rewards. 2 <= k <= G. With the rewards in order, r_(1) <= ... <= r_(n), the completion in place j has
    [C(j-1, k-1) r_(j) - sum over m < j of C(m-1, k-2) r_(m)] / C(n, k).
    """
    group = _need_group(reward, "pkpo")
    if not 2 <= k <= group:
        raise ValueError(f"pkpo needs 2 <= k <= {group} completions per prompt, got k={k}")
    ordered, order = reward.sort(dim=1)  # unscored ones last
    choose = reward.new_tensor([[math.comb(n, size) for size in (k - 2, k - 1, k)] for n in range(group + 1)])
    lower = (choose[:-1, 0] * ordered).cumsum(dim=1)
    lower = torch.cat([torch.zeros_like(lower[:, :1]), lower[:, :-1]], dim=1)  # the sum over m < j
    scored = (~reward.isnan()).sum(dim=1, keepdim=True)  # (P, 1)
    advantages = (choose[:-1, 1] * ordered - lower) / choose[scored, 2].clamp(min=1)
    return torch.empty_like(reward).scatter(1, order, advantages)


def _choose_ratio(w: Tensor, n: Tensor, k: int) -> Tensor:
    """C(w, k) / C(n, k) as a product, 0 where w < k."""
    ratio = torch.ones_like(w)
    for i in range(k):
        ratio = ratio * (w - i).clamp(min=0) / (n - i).clamp(min=1)
    return ratio
