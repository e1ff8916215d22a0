"""Advantages against their papers: values in plain Python, and what the gradient is an estimate of, without sampling.

Each transcription has the rewards of groups as lists, the lengths of the responses, and each reward function's rewards.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from statistics import mean, stdev

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.algorithms.test_advantages import member, pass_at_k_by_enumeration, pkpo_by_enumeration
from trl_ext.algorithms.advantages import ADVANTAGES
from trl_ext.algorithms.aggregation import AGGREGATIONS
from trl_ext.algorithms.kl import KL_ESTIMATORS
from trl_ext.algorithms.objective import Objective
from trl_ext.algorithms.policy_losses import POLICY_LOSSES
from trl_ext.algorithms.types import LossInputs, StepTotals

EPS, WEIGHTS = 1e-6, (1.0, 0.5)
Groups = list[list[float]]
Transcription = Callable[[Groups, Groups, list[Groups]], object]


def by_group(of_one: Callable[[list[float], list[float]], object]) -> Transcription:
    """A transcription from that of one group, which has its rewards and the lengths of its responses."""
    return lambda rewards, lengths, functions: [of_one(r, n) for r, n in zip(rewards, lengths, strict=True)]


def flat(groups: Groups) -> list[float]:
    return [value for group in groups for value in group]


def centered(group: list[float]) -> list[float]:
    return [r - mean(group) for r in group]


def over(scale: float, groups: Groups) -> Groups:
    return [[value / (scale + EPS) for value in group] for group in groups]


def gdpo(rewards: Groups, lengths: Groups, functions: list[Groups]) -> Groups:
    """arXiv:2601.05242: normalized by group for each function, summed with weights, normalized over the batch."""
    normalized = [[over(stdev(group), [centered(group)])[0] for group in groups] for groups in functions]
    total = [
        [sum(w * value for w, value in zip(WEIGHTS, values, strict=True)) for values in zip(*same, strict=True)]
        for same in zip(*normalized, strict=True)
    ]
    return over(stdev(flat(total)), [[value - mean(flat(total)) for value in group] for group in total])


def length_reward(rewards: list[float], lengths: list[float]) -> list[float]:
    """arXiv:2501.12599, section 2.3.3: lambda if correct, min(0, lambda) if not, added to the reward."""
    total = []
    for r, n in zip(rewards, lengths, strict=True):
        bonus = 0.5 - (n - min(lengths)) / (max(lengths) - min(lengths))
        total.append(r + (bonus if r > 0.5 else min(0.0, bonus)))
    return centered(total)


def discounted(rewards: list[float], lengths: list[float]) -> Groups:
    """The return G_t of a reward at the last token l, gamma^(l - t) R, of the centered reward; here until t = 7."""
    return [
        [0.99 ** (n - t) * a if t <= n else 0.0 for t in range(1, 8)]
        for a, n in zip(centered(rewards), lengths, strict=True)
    ]


def turn_returns(rewards: list[float], lengths: list[float]) -> Groups:
    """arXiv:2402.03300, section 4.1.3: sums of the normalized rewards from a token's step on; here until token 7.

    The steps are as the test has them: the first token, with reward 1/2, and the others, with the outcome's.
    """
    steps = [[0.5, r] for r in rewards]
    normalized = [[(s - mean(flat(steps))) / (stdev(flat(steps)) + EPS) for s in of_one] for of_one in steps]
    return [[a + b, *[b] * (int(n) - 1), *[0.0] * (7 - int(n))] for (a, b), n in zip(normalized, lengths, strict=True)]


PAPERS: dict[str, Transcription] = {
    "raw": by_group(lambda r, n: r),
    "zero": by_group(lambda r, n: [0.0 for _ in r]),
    "group_mean": by_group(lambda r, n: centered(r)),
    "group_std": by_group(lambda r, n: [a / (stdev(r) + EPS) for a in centered(r)]),
    "batch_std": lambda rewards, n, f: over(stdev(flat(rewards)), [centered(group) for group in rewards]),
    "gdpo": gdpo,
    "reinforce_plus_plus": lambda rewards, n, f: over(
        stdev(flat(rewards)), [[r - mean(flat(rewards)) for r in group] for group in rewards]
    ),
    "reinforce_plus_plus_baseline": lambda rewards, n, f: over(
        stdev(flat([centered(group) for group in rewards])), [centered(group) for group in rewards]
    ),
    "opo": by_group(lambda r, n: [x - sum(map(operator.mul, n, r)) / sum(n) for x in r]),
    "length_reward": by_group(length_reward),
    "w_reinforce": by_group(lambda r, n: [0.1 if x > 0.5 else -1.0 for x in r]),
    "discounted": by_group(discounted),
    "turn_returns": by_group(turn_returns),
    "leave_one_out": by_group(lambda r, n: [x - mean(r[:i] + r[i + 1 :]) for i, x in enumerate(r)]),
    "max_rl": by_group(lambda r, n: [a / (mean(r) + EPS) for a in centered(r)]),
    "pass_at_k": by_group(lambda r, n: pass_at_k_by_enumeration([x > 0.5 for x in r], 4, EPS)),
    "pkpo": by_group(lambda r, n: pkpo_by_enumeration(r, 4)),
}


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_an_advantage_has_the_value_of_its_paper(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(4, 6, 2, generator=generator, dtype=torch.float64)
    rewards[1, :, 0], rewards[2] = 0.5, (rewards[2] > 0.5).double()  # equal ones, and those of a verifier
    lengths = torch.randint(2, 8, (4, 6), generator=generator).double()
    total, lengths[0, 0] = (rewards * torch.tensor(WEIGHTS)).sum(dim=2), 7
    inputs = {"rewards": rewards, "weights": torch.tensor(WEIGHTS).double(), "lengths": lengths}
    inputs["correct"] = (total > 0.5).double()
    inputs["turn_lengths"] = torch.stack([torch.ones_like(lengths), lengths - 1], dim=-1).long()
    inputs["turn_rewards"] = torch.tensor([0.5, 0.0], dtype=torch.float64).expand(4, 6, 2)
    function = ADVANTAGES.build(name)
    found = function(total, **{asked: inputs[asked] for asked in ADVANTAGES.inputs_of(function)})
    wanted = PAPERS[name](total.tolist(), lengths.tolist(), [rewards[:, :, f].tolist() for f in range(2)])
    assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-12)


# What the gradient estimates: summed over all draws of a group from three outcomes, with their probabilities.

OUTCOMES, DRAWS = 3, 4


def reward_of(outcomes: Tensor) -> Tensor:
    """The second of three outcomes is half of an answer, the third is one."""
    return torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)[outcomes]


def best_of(draws: int) -> Callable[[Tensor], Tensor]:
    """The expected reward of the best of some draws, from the probabilities of the outcomes."""

    def objective(p: Tensor) -> Tensor:
        return sum(
            (p[list(sample)].prod() * reward_of(torch.tensor(sample)).max() for sample in _samples(draws)),
            start=torch.zeros(()),
        )

    return objective


def _samples(draws: int) -> list[tuple[int, ...]]:
    return list(itertools.product(range(OUTCOMES), repeat=draws))


def log_likelihood(p: Tensor) -> Tensor:
    """log of the success probability, as its Maclaurin series in the failure probability up to the order G - 1."""
    failure = p[:2].sum()
    return -sum((failure**order / order for order in range(1, DRAWS)), start=torch.zeros(()))


# name -> options, whether only the last outcome has a reward, and what is ascended
ASCENDED: dict[str, tuple[dict[str, float], bool, Callable[[Tensor], Tensor]]] = {
    "raw": ({}, False, best_of(1)),
    "leave_one_out": ({}, False, best_of(1)),
    "group_mean": ({}, False, lambda p: (DRAWS - 1) / DRAWS * best_of(1)(p)),  # the mean has the reward in it
    "w_reinforce": ({"threshold": 0.75}, False, lambda p: 0.1 * p[2] - p[:2].sum()),
    "max_rl": ({"eps": 1e-14}, True, log_likelihood),
    "pkpo": ({"k": 3}, False, lambda p: best_of(3)(p) / DRAWS),  # a sum over completions, where a loss is a mean
}


@pytest.mark.parametrize("name", ASCENDED)
def test_the_expected_gradient_is_that_of_what_it_ascends(name: str) -> None:
    options, is_binary, objective = ASCENDED[name]
    draws = torch.tensor(_samples(DRAWS))  # (P, G) outcomes
    logits = torch.tensor([0.4, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)
    advantage = member(name, **options)((draws == 2).double() if is_binary else reward_of(draws))
    rows = logp[draws].view(-1, 1)  # a response is one token
    mask = torch.ones_like(rows, dtype=torch.bool)
    probability = logp[draws].sum(dim=1).exp().detach().repeat_interleave(DRAWS)[:, None]
    x = LossInputs(rows, rows.detach(), advantage.view(-1, 1), mask)
    loss, _ = Objective(POLICY_LOSSES["reinforce"], AGGREGATIONS["constant"], KL_ESTIMATORS["k3"])(
        x, StepTotals(DRAWS, DRAWS, 1), sampler_weight=probability
    )
    found = torch.autograd.grad(-loss, logits, retain_graph=True)[0]
    wanted = torch.autograd.grad(objective(logp.exp()), logits)[0]
    assert_close(found, wanted, rtol=0, atol=1e-12)
    assert found.abs().max() > 1e-3
