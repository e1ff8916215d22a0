"""Gradients against objectives written down from the papers, in probabilities and one sequence at a time.

Each transcription is the objective of one sequence, which its paper maximizes and averages over sequences. p are the
probabilities of its tokens under the policy, q under the old policy, m under the engine that sampled, a its advantage.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.support.cases import loss_inputs, totals_of
from trl_ext.algorithms.aggregation import AGGREGATIONS
from trl_ext.algorithms.kl import KL_ESTIMATORS
from trl_ext.algorithms.objective import Objective
from trl_ext.algorithms.policy_losses import POLICY_LOSSES
from trl_ext.algorithms.types import StepTokens

Objective_ = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def sg(value: Tensor) -> Tensor:
    return value.detach()


def surrogate(ratio: Tensor, a: float, low: float, high: float) -> Tensor:
    """PPO, arXiv:1707.06347, eq. 7."""
    return torch.min(ratio * a, ratio.clip(low, high) * a)


def gmpo(p: Tensor, q: Tensor, m: Tensor, a: float) -> Tensor:
    """arXiv:2507.20673, eq. 4: (prod |min(rho A, clip(rho, e^-0.4, e^0.4) A)|)^(1/|o|) sgn(A)."""
    terms = surrogate(p / q, a, math.exp(-0.4), math.exp(0.4)).abs()
    return terms.prod() ** (1 / len(p)) * math.copysign(1, a)


def ce_gppo(p: Tensor, q: Tensor, m: Tensor, a: float) -> Tensor:
    """arXiv:2509.20712, eq. 8."""
    total = torch.zeros((), dtype=p.dtype)
    for delta in p / q:
        if delta < 0.8 and a < 0:
            total = total + 0.75 * 0.8 / sg(delta) * delta * a
        elif delta > 1.2 and a > 0:
            total = total + 1.0 * 1.2 / sg(delta) * delta * a
        else:
            total = total + delta * a
    return total / len(p)


def aspo(p: Tensor, q: Tensor, m: Tensor, a: float) -> Tensor:
    """arXiv:2510.06062, section 6: masks, eq. 3, and a dual clip of the weight's value that retains the gradient."""
    total = torch.zeros((), dtype=p.dtype)
    for pi, old in zip(p, q, strict=True):
        ratio = pi / old
        if (a < 0 and ratio < 0.8) or (a > 0 and ratio > 1.2):
            continue
        weight = old * pi / sg(pi * pi) if a > 0 else ratio
        if weight > 3:
            weight = 3 * pi / sg(pi)
        total = total + weight * a
    return total / len(p)


def vespo(p: Tensor, q: Tensor, m: Tensor, a: float) -> Tensor:
    """arXiv:2602.10693, eq. 20: W^c1 exp(c2 (1 - W)) A log pi(tau), here per token."""
    w, (c1, c2) = (p / m).prod(), (2, 3) if a > 0 else (3, 2)
    return sg(w**c1 * torch.exp(c2 * (1 - w))) * a * p.log().sum() / len(p)


def dppo(divergence: Callable[[Tensor, Tensor], Tensor], delta: float) -> Objective_:
    """arXiv:2602.04879, eq. 12."""

    def objective(p: Tensor, q: Tensor, m: Tensor, a: float) -> Tensor:
        total = torch.zeros((), dtype=p.dtype)
        for pi, mu in zip(p, m, strict=True):
            r, d = pi / mu, divergence(mu, pi)
            is_masked = (a > 0 and r > 1 and d > delta) or (a < 0 and r < 1 and d > delta)
            total = total + (0 if is_masked else 1) * r * a
        return total / len(p)

    return objective


def gspo_token(p: Tensor, q: Tensor, m: Tensor, a: float) -> Tensor:
    """arXiv:2507.18071, section 4.3: s_t = sg(s) pi / sg(pi)."""
    s = (p / q).prod() ** (1 / len(p))
    return surrogate(sg(s) * p / sg(p), a, 1 - 3e-4, 1 + 4e-4).mean()


PAPERS: dict[str, Objective_] = {
    "reinforce": lambda p, q, m, a: (a * p.log()).mean(),
    "importance_ratio": lambda p, q, m, a: (p / q * a).mean(),
    "ppo_clip": lambda p, q, m, a: surrogate(p / q, a, 0.8, 1.2).mean(),
    # arXiv:2507.18071, eq. 5 and 7
    "gspo": lambda p, q, m, a: surrogate((p / q).prod() ** (1 / len(p)), a, 1 - 3e-4, 1 + 4e-4),
    "gspo_token": gspo_token,
    "gmpo": gmpo,
    # arXiv:2506.13585, eq. 4
    "cispo": lambda p, q, m, a: (sg((p / q).clip(max=5)) * a * p.log()).mean(),
    # arXiv:2511.20347, eq. 5 and 6
    "sapo": lambda p, q, m, a: (
        torch.sigmoid((1.0 if a > 0 else 1.05) * (p / q - 1)) * 4 / (1.0 if a > 0 else 1.05) * a
    ).mean(),
    "ce_gppo": ce_gppo,
    "aspo": aspo,
    "vespo": vespo,
    # eq. 13
    "dppo_tv": dppo(lambda mu, pi: (mu - pi).abs(), 0.2),
    # eq. 14
    "dppo_kl": dppo(lambda mu, pi: mu * (mu / pi).log() + (1 - mu) * ((1 - mu) / (1 - pi)).log(), 0.05),
}


# Objectives that choose by all tokens of the step, from its sequences as (p, q, a).
Sequences = list[tuple[Tensor, Tensor, float]]


def covariances(sequences: Sequences) -> dict[tuple[int, int], float]:
    """arXiv:2505.22617, section 4.2, of each token by its sequence and place."""
    tokens = {(i, t): (math.log(p[t]), a) for i, (p, _, a) in enumerate(sequences) for t in range(len(p))}
    mean_logp, mean_a = (math.fsum(values) / len(tokens) for values in zip(*tokens.values(), strict=True))
    return {place: (logp - mean_logp) * (a - mean_a) for place, (logp, a) in tokens.items()}


def kl_cov(sequences: Sequences) -> list[Tensor]:
    """r A less |log(old / pi)| for the fifth of the tokens that ranks highest by covariance."""
    by_rank = sorted((found := covariances(sequences)), key=lambda place: -found[place])
    penalized = set(by_rank[: len(by_rank) // 5])
    return [
        sum(
            (p[t] / q[t] * a - ((q[t] / p[t]).log().abs() if (i, t) in penalized else 0) for t in range(len(p))),
            start=torch.zeros(()),
        )
        / len(p)
        for i, (p, q, a) in enumerate(sequences)
    ]


def clip_cov(sequences: Sequences) -> list[Tensor]:
    """PPO's objective without those drawn from the tokens of a covariance in 0.1 .. 2: a tenth of all."""
    found = covariances(sequences)

    def is_clipped(i: int, t: int) -> bool:
        p, q, a = sequences[i]
        return bool(p[t] / q[t] > 1.2) if a > 0 else bool(p[t] / q[t] < 0.8)

    lots = torch.rand(len(found), generator=torch.Generator().manual_seed(len(found))).tolist()
    inside = [
        (lot, place)
        for lot, place in zip(lots, found, strict=True)
        if 0.1 < found[place] < 2 and not is_clipped(*place)
    ]
    dropped = {place for _, place in sorted(inside, reverse=True)[: len(found) // 10]}
    assert 0 < len(dropped) < len(inside)
    return [
        torch.stack(
            [surrogate(p[t] / q[t], a, 0.8, 1.2) * (0 if (i, t) in dropped else 1) for t in range(len(p))]
        ).mean()
        for i, (p, q, a) in enumerate(sequences)
    ]


def bapo(sequences: Sequences) -> list[Tensor]:
    """arXiv:2510.18927: clip(r, c_low, c_high), widened until good tokens have half of the sum of |surrogate|."""
    bounds = [(0.6, 1.2 + 0.05 * n) for n in range(37)] + [(0.6 + 0.05 * n, 3.0) for n in range(1, 7)]
    for low, high in bounds:
        values = [surrogate(p / q, a, low, high) for p, q, a in sequences]
        good = math.fsum(value.clip(min=0).sum().item() for value in values)
        if good >= 0.5 * math.fsum(value.abs().sum().item() for value in values):
            break
    return [value.mean() for value in values]


OF_STEP: dict[str, tuple[dict[str, float], Callable[[Sequences], list[Tensor]]]] = {
    "kl_cov": ({"fraction": 0.2}, kl_cov),
    "clip_cov": ({"fraction": 0.1, "low": 0.1, "high": 2.0}, clip_cov),
    "bapo": ({}, bapo),
}


@pytest.mark.parametrize("off_policy", [0.0, 0.1, 0.8])
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_loss_has_the_gradient_of_its_paper(name: str, off_policy: float) -> None:
    x = loss_inputs(off_policy)
    shift = max(x.logp.detach().amax(), x.old_logp.amax()) + 0.2  # probabilities below 1
    old, sampled = x.old_logp - shift, x.old_logp - shift + 0.1 * torch.sin(torch.arange(36.0).view(6, 6).double())
    logp = (x.logp.detach() - shift).requires_grad_()
    x = type(x)(logp, old, x.advantage, x.mask)
    options, of_step = OF_STEP.get(name, ({}, None))
    ours, _ = Objective(POLICY_LOSSES.build(name, **options), AGGREGATIONS["sequence_mean"], KL_ESTIMATORS["k3"])(
        x, totals_of(x.mask), sampled_logp=sampled, step=StepTokens.of(x)
    )
    found = torch.autograd.grad(ours, logp)[0]
    rows = [
        (logp[i][row].exp(), old[i][row].exp(), sampled[i][row].exp(), x.advantage[i].item())
        for i, row in enumerate(x.mask)
        if row.any()
    ]
    sequences = of_step([(p, q, a) for p, q, _, a in rows]) if of_step else [PAPERS[name](*row) for row in rows]
    wanted = -torch.autograd.grad(torch.stack(sequences).sum() / len(x.mask), logp)[0]
    assert_close(found, wanted, rtol=0, atol=1e-12)
    assert found.abs().max() > 1e-3
