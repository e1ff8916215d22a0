"""Which completions of a rollout are trained on: rewards (P, G) -> (P, G) bool.

A completion that is left out has no advantage and is in no statistic of its group, as one that nothing scored. A group
of which none is kept is one that `dynamic_sampling_tries` samples again, with another problem. An unscored completion
(NaN) is never kept.

A member that needs more than the total reward asks for `lengths` in tokens, `truncated` or `correct`, all (P, G), as an
advantage does. Letters: P prompts, G completions per prompt.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trl_ext.registry import Registry


def _fault(selection: Callable[..., Tensor], group_size: int) -> str | None:
    reward = torch.zeros(2, group_size)  # (P, G)
    reward[0, 0] = reward[:, -1] = 1.0
    inputs = {"lengths": torch.full_like(reward, 3.0), "truncated": torch.zeros_like(reward), "correct": reward}
    kept = selection(reward, **{name: inputs[name] for name in SELECTIONS.inputs_of(selection)})
    fits = isinstance(kept, Tensor) and kept.dtype is torch.bool and kept.shape == reward.shape
    return None if fits else f"must return a boolean tensor (P, G), here (2, {group_size})"


SELECTIONS = Registry("rollout selection", _fault, inputs=["lengths", "truncated", "correct"])


def rewards_differ(reward: Tensor) -> Tensor:
    """(P, G) rewards, NaN where unscored -> (P,) bool: groups with nonzero reward variance."""
    unscored = reward.isnan()
    return reward.masked_fill(unscored, -torch.inf).amax(1) > reward.masked_fill(unscored, torch.inf).amin(1)


@SELECTIONS.register
def mixed_groups(reward: Tensor, *, correct: Tensor) -> Tensor:
    """All of a group in which some completions are correct and some are not, by the reward where neither is known.

    The constraint of DAPO's dynamic sampling (arXiv:2503.14476, eq. 11). Not by the reward alone, since a penalty of
    the length makes the rewards of a group differ that was solved by all.
    """
    scores = torch.where(correct.isnan(), reward, correct.to(reward.dtype))
    return rewards_differ(scores)[:, None] & ~reward.isnan()


@SELECTIONS.register
def reward_variance(reward: Tensor, *, min_std: float = 0.0) -> Tensor:
    """All of a group whose rewards have a standard deviation (of the population) above `min_std`."""
    variance = _variance(reward, ~reward.isnan())[:, None]
    return rewards_differ(reward)[:, None] & (variance > min_std**2) & ~reward.isnan()


@SELECTIONS.register
def max_variance(reward: Tensor, *, keep: int = 4) -> Tensor:
    """The `keep` completions of a group whose rewards vary most: some of the highest with the rest of the lowest.

    PODS (arXiv:2504.13818, max-variance down-sampling), whose advantages are of the kept ones as here. None of a group
    of equal rewards.
    """
    group = _need(reward, keep, "max_variance", 2)  # one reward does not vary
    ordered, order = reward.sort(dim=1)  # unscored ones last
    scored, place = (~reward.isnan()).sum(dim=1, keepdim=True), torch.arange(group, device=reward.device)
    sets = torch.stack(
        [((place < keep - high) | (place >= scored - high)) & (place < scored) for high in range(keep + 1)]
    )
    best = torch.stack([_variance(ordered, kept) for kept in sets]).argmax(dim=0)  # (P,)
    chosen = sets[best, torch.arange(len(reward), device=reward.device)]
    return torch.empty_like(chosen).scatter(1, order, chosen) & rewards_differ(reward)[:, None]


@SELECTIONS.register
def shortest(reward: Tensor, *, lengths: Tensor, keep: int = 4) -> Tensor:
    """The `keep` shortest completions of a group: GFPO (arXiv:2508.09726, algorithm 1 with the metric response length).

    Its eq. 2 has the mean and the standard deviation of the kept ones' rewards in the advantage, and all responses'
    tokens in the normalizer, as here with `group_std` and `token_mean`.
    """
    _need(reward, keep, "shortest")
    return _first(lengths, keep, reward)


@SELECTIONS.register
def token_efficiency(reward: Tensor, *, lengths: Tensor, keep: int = 4) -> Tensor:
    """The `keep` completions of a group with the most reward per token.

    GFPO (arXiv:2508.09726, algorithm 1 with the metric token efficiency of its section 3).
    """
    _need(reward, keep, "token_efficiency")
    return _first(-reward / lengths.clamp(min=1), keep, reward)


def _first(measure: Tensor, keep: int, reward: Tensor) -> Tensor:
    """The `keep` scored completions of each group where (P, G) `measure` is least; the earlier one of equal ones."""
    unscored = reward.isnan()
    ranks = measure.to(reward.dtype).masked_fill(unscored, torch.inf).argsort(dim=1, stable=True).argsort(dim=1)
    return (ranks < keep) & ~unscored


def _variance(reward: Tensor, inside: Tensor) -> Tensor:
    """(P,): of the rewards that are inside, (P, G) bool."""
    count = inside.sum(dim=1, keepdim=True).clamp(min=1)
    mean = torch.where(inside, reward, 0.0).sum(dim=1, keepdim=True) / count
    return torch.where(inside, (reward - mean).square(), 0.0).sum(dim=1) / count[:, 0]


def _need(reward: Tensor, keep: int, name: str, least: int = 1) -> int:
    if not least <= keep <= reward.shape[1]:
        raise ValueError(f"{name} needs {least} <= keep <= {reward.shape[1]} completions per prompt, got keep={keep}")
    return reward.shape[1]
