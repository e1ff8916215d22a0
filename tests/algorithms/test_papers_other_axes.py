"""Aggregations, KL penalties, sampler corrections and selections against their formulas, one sequence at a time.

p are the probabilities of a sequence's tokens under the policy, q under the reference, m under the engine that sampled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from statistics import pvariance

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.support.cases import loss_inputs, totals_of
from trl_ext.algorithms.aggregation import AGGREGATIONS
from trl_ext.algorithms.kl import KL_ESTIMATORS
from trl_ext.algorithms.objective import Objective
from trl_ext.algorithms.policy_losses import POLICY_LOSSES
from trl_ext.algorithms.sampler_correction import SAMPLER_REJECTIONS, SAMPLER_WEIGHTS
from trl_ext.algorithms.selection import SELECTIONS

MOST_TOKENS = 10  # of a completion, by the sampler
AGGREGATED: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "sequence_mean": lambda rows: torch.stack([row.mean() for row in rows if len(row)]).sum() / len(rows),
    "constant": lambda rows: torch.stack([row.sum() / MOST_TOKENS for row in rows]).mean(),
    "token_mean": lambda rows: torch.cat(rows).mean(),
}


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_an_aggregation_has_the_gradient_of_its_formula(name: str) -> None:
    x = loss_inputs()
    loss = x.logp.exp()
    ours = AGGREGATIONS[name](loss, x.mask, totals_of(x.mask, MOST_TOKENS))
    wanted = AGGREGATED[name]([row[inside] for row, inside in zip(loss, x.mask, strict=True)])
    assert_close(ours, wanted, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(value, x.logp, retain_graph=True)[0] for value in (ours, wanted)]
    assert_close(*gradients, rtol=0, atol=1e-12)


PENALTIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": lambda p, q: -(q / p).log(),
    "k2": lambda p, q: (q / p).log() ** 2 / 2,
    "k3": lambda p, q: (q / p) - 1 - (q / p).log(),
}


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_a_kl_penalty_has_the_gradient_of_its_formula(name: str) -> None:
    x = loss_inputs()
    value, _ = Objective(POLICY_LOSSES["reinforce"], AGGREGATIONS["token_mean"], KL_ESTIMATORS[name], beta=0.5)(
        x, totals_of(x.mask), ref_logp=x.old_logp
    )
    p, a = x.logp[x.mask].exp(), x.advantage.expand_as(x.logp)[x.mask]
    wanted = (-a * p.log() + 0.5 * PENALTIES[name](p, x.old_logp[x.mask].exp())).mean()
    assert_close(value, wanted, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(total, x.logp, retain_graph=True)[0] for total in (value, wanted)]
    assert_close(*gradients, rtol=0, atol=1e-12)


Ratios = list[float]


def k3(ratio: float) -> float:
    return ratio - 1 - math.log(ratio)


WEIGHTS: dict[str, Callable[[Ratios], Ratios]] = {
    "unweighted": lambda w: [1.0] * len(w),
    "token": lambda w: [min(ratio, 2.0) for ratio in w],
    "sequence": lambda w: [min(math.prod(w), 2.0)] * len(w),
}
KEPT: dict[str, Callable[[Ratios], Ratios]] = {  # 1 or 0
    "keep_all": lambda w: [True] * len(w),
    "token_ratio": lambda w: [0.5 <= ratio <= 5.0 for ratio in w],
    "sequence_ratio": lambda w: [math.prod(w) <= 3.0] * len(w),
    "sequence_mean_ratio": lambda w: [0.95 <= math.prod(w) ** (1 / len(w)) <= 1.05] * len(w),
    "token_k3": lambda w: [k3(ratio) <= 0.1 for ratio in w],
    "sequence_mean_k3": lambda w: [sum(map(k3, w)) / len(w) <= 0.01] * len(w),
}


def factors_by_hand(old: Tensor, sampled: Tensor, mask: Tensor, of_one: Callable[[Ratios], Ratios]) -> Tensor:
    """(tokens that train,): what one sequence after another says of its tokens."""
    ratios = [(p[row].exp() / m[row].exp()).tolist() for p, m, row in zip(old, sampled, mask, strict=True)]
    return torch.tensor([value for row in ratios if row for value in of_one(row)], dtype=torch.float64)


MISMATCHES = [0.05, 0.2, 1.0]


def of_a_sampler(old: Tensor, mismatch: float) -> Tensor:
    return old + mismatch * torch.randn(old.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("mismatch", MISMATCHES)
@pytest.mark.parametrize("name", [*sorted(SAMPLER_WEIGHTS), *sorted(SAMPLER_REJECTIONS)])
def test_a_correction_scales_the_gradient_by_its_formula(name: str, mismatch: float) -> None:
    x = loss_inputs()
    sampled = of_a_sampler(x.old_logp, mismatch)
    factor = {**SAMPLER_WEIGHTS, **SAMPLER_REJECTIONS}[name](x.old_logp, sampled, x.mask)
    objective = Objective(POLICY_LOSSES["importance_ratio"], AGGREGATIONS["token_mean"], KL_ESTIMATORS["k3"])
    value, _ = objective(x, totals_of(x.mask), sampler_weight=factor)
    found = torch.autograd.grad(value, x.logp)[0][x.mask]
    of_one = {**WEIGHTS, **KEPT}[name]
    ratio, a = (x.logp - x.old_logp).exp()[x.mask].detach(), x.advantage.expand_as(x.logp)[x.mask]
    wanted = -factors_by_hand(x.old_logp, sampled, x.mask, of_one) * ratio * a / x.mask.sum()
    assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", sorted(set(SAMPLER_REJECTIONS) - {"keep_all"}))
def test_a_rejection_keeps_some_and_not_all(name: str) -> None:
    x = loss_inputs()
    kept = [
        SAMPLER_REJECTIONS[name](x.old_logp, of_a_sampler(x.old_logp, mismatch), x.mask).expand_as(x.mask)[x.mask]
        for mismatch in MISMATCHES
    ]
    assert 0.1 < torch.cat(kept).double().mean() < 0.95


Group = list[float]
KEEP = 4  # by default
SELECTED: dict[str, Callable[[Group, Group], list[int]]] = {
    # 0 < number of correct ones < G, arXiv:2503.14476, eq. 11
    "mixed_groups": lambda r, n: list(range(len(r))) if 0 < sum(x > 0.5 for x in r) < len(r) else [],
    "reward_variance": lambda r, n: list(range(len(r))) if pvariance(r) > 0 else [],
    "max_variance": lambda r, n: (
        list(max(itertools.combinations(range(len(r)), KEEP), key=lambda s: pvariance([r[i] for i in s])))
        if pvariance(r) > 0
        else []
    ),
    # arXiv:2508.09726, algorithm 1: sorted by the metric, the first k
    "shortest": lambda r, n: sorted(range(len(r)), key=lambda i: n[i])[:KEEP],
    "token_efficiency": lambda r, n: sorted(range(len(r)), key=lambda i: r[i] / n[i], reverse=True)[:KEEP],
}


@pytest.mark.parametrize("name", sorted(SELECTIONS))
def test_a_selection_keeps_what_its_formula_says(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    reward = torch.rand(8, 6, generator=generator, dtype=torch.float64)
    reward[1], reward[2], reward[3] = 0.25, 0.75, 0.5 + reward[3] / 2  # equal ones, then all correct
    lengths = torch.stack([torch.randperm(6, generator=generator) for _ in reward]) + 1.0
    inputs = {"lengths": lengths, "truncated": lengths > 5, "correct": (reward > 0.5).double()}
    kept = SELECTIONS[name](reward, **{asked: inputs[asked] for asked in SELECTIONS.inputs_of(SELECTIONS[name])})
    wanted = [SELECTED[name](r, n) for r, n in zip(reward.tolist(), lengths.tolist(), strict=True)]
    assert [row.nonzero().flatten().tolist() for row in kept] == [sorted(places) for places in wanted]
