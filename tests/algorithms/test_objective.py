"""The scalar that is differentiated, and each preset against its formula in plain Python."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.support.cases import ROWS, loss_inputs, totals_of
from trl_ext.algorithms.advantages import ADVANTAGES
from trl_ext.algorithms.aggregation import AGGREGATIONS
from trl_ext.algorithms.kl import KL_ESTIMATORS
from trl_ext.algorithms.objective import Objective
from trl_ext.algorithms.policy_losses import POLICY_LOSSES
from trl_ext.algorithms.presets import PRESETS
from trl_ext.algorithms.sampler_correction import SAMPLER_CORRECTIONS
from trl_ext.algorithms.types import LossInputs, StepTotals
from trl_ext.grpo.config import ExtGRPOConfig

LOSS, MEAN, K3 = POLICY_LOSSES["ppo_clip"], AGGREGATIONS["sequence_mean"], KL_ESTIMATORS["k3"]


def reference(x: LossInputs) -> Tensor:
    return x.old_logp + 0.3 * torch.cos(torch.arange(x.logp.numel(), dtype=torch.float64)).view_as(x.logp)


# The parts.


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
def test_without_extras_it_is_the_aggregated_policy_loss(loss: str, aggregation: str) -> None:
    x = loss_inputs()
    totals = totals_of(x.mask)
    value, metrics = Objective(POLICY_LOSSES[loss], AGGREGATIONS[aggregation], K3)(x, totals)
    policy_loss = POLICY_LOSSES[loss](x)
    assert_close(value, AGGREGATIONS[aggregation](policy_loss.loss, x.mask, totals), rtol=0, atol=0)
    assert metrics.keys() == policy_loss.metrics.keys()


@pytest.mark.parametrize("kl", sorted(KL_ESTIMATORS))
def test_beta_adds_the_chosen_kl_penalty_and_logs_it_unscaled(kl: str) -> None:
    x = loss_inputs()
    totals, ref = totals_of(x.mask), reference(x)
    plain, _ = Objective(LOSS, MEAN, KL_ESTIMATORS[kl])(x, totals)
    value, metrics = Objective(LOSS, MEAN, KL_ESTIMATORS[kl], beta=0.7)(x, totals, ref_logp=ref)
    penalty = KL_ESTIMATORS[kl](x.logp, ref)
    assert_close(value, plain + 0.7 * MEAN(penalty, x.mask, totals), rtol=0, atol=1e-12)
    assert_close(metrics["kl"], penalty.detach(), rtol=0, atol=0)
    assert not metrics["kl"].requires_grad


def test_bias_correction_multiplies_kl_penalty_by_the_ratio() -> None:
    x = loss_inputs()
    totals, ref = totals_of(x.mask), reference(x)
    value, _ = Objective(LOSS, MEAN, K3, beta=1.0, kl_bias_correction=True)(x, totals, ref_logp=ref)
    wanted = MEAN(LOSS(x).loss + K3(x.logp, ref) * torch.exp(x.logp - x.old_logp), x.mask, totals)
    assert_close(value, wanted, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(v, x.logp)[0] for v in (value, wanted)]
    assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("old_logits", [[0.3, -0.2, 0.5], [0.0, 0.9, -0.4]], ids=["on_policy", "off_policy"])
@pytest.mark.parametrize("kl", sorted(KL_ESTIMATORS))
def test_kl_penalty_gradient_is_that_of_the_divergence(kl: str, old_logits: list[float], tmp_path: Path) -> None:
    """Tokens of three kinds, summed with the probabilities of the policy that sampled them: no noise, exact in float64.

    Tang and Munos, arXiv:2506.09477, section 3, for k1 (none without the ratio), k2 and k3.
    """
    config = ExtGRPOConfig(output_dir=str(tmp_path), use_cpu=True, preset="no_baseline", beta=1.0, kl_estimator=kl)
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    old, ref = (torch.tensor(x, dtype=torch.float64).log_softmax(0) for x in (old_logits, [1.0, 0.1, -0.7]))
    logp = logits.log_softmax(0)
    divergence = (logp.exp() * (logp - ref)).sum()
    token = torch.zeros(1, 1, dtype=torch.float64)
    x = [LossInputs(logp[i].view(1, 1), old[i].view(1, 1), token, token == 0) for i in range(3)]
    penalties = [config.objective()(x[i], StepTotals(1, 1, 1), ref_logp=ref[i].view(1, 1))[0] for i in range(3)]
    expected = sum((p * q for p, q in zip(penalties, old.exp(), strict=True)), start=torch.zeros(()))
    found, wanted = (torch.autograd.grad(value, logits, retain_graph=True) for value in (expected, divergence))
    assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e3])
@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
def test_masked_token_affects_neither_value_nor_gradient(loss: str, poison: float) -> None:
    """1e3 is finite, but exp of it is not."""
    x = loss_inputs()
    totals, ref = totals_of(x.mask), reference(x).detach()
    objective = Objective(POLICY_LOSSES[loss], MEAN, K3, beta=0.1, kl_bias_correction=True)
    wanted, _ = objective(x, totals, ref_logp=ref)
    logp = x.logp.detach().masked_fill(~x.mask, poison).requires_grad_()
    value, _ = objective(dataclasses.replace(x, logp=logp), totals, ref_logp=ref)
    assert_close(value, wanted, rtol=0, atol=0)
    assert_close(torch.autograd.grad(value, logp), torch.autograd.grad(wanted, x.logp), rtol=0, atol=0)


def test_a_penalty_without_reference_is_refused() -> None:
    x = loss_inputs()
    with pytest.raises(ValueError, match=r"beta is 0\.05, so the objective needs ref_logp"):
        Objective(LOSS, MEAN, K3, beta=0.05)(x, totals_of(x.mask))


@pytest.mark.parametrize("correction", sorted(SAMPLER_CORRECTIONS))
def test_sampler_weight_scales_policy_term_and_not_kl_penalty(correction: str) -> None:
    x = loss_inputs()
    totals, ref = totals_of(x.mask), reference(x)
    weight = SAMPLER_CORRECTIONS.build(correction)(x.logp.detach(), x.old_logp, x.mask)
    value, _ = Objective(LOSS, MEAN, K3, beta=0.7)(x, totals, ref_logp=ref, sampler_weight=weight)
    wanted = MEAN(weight * LOSS(x).loss + 0.7 * K3(x.logp, ref), x.mask, totals)
    assert_close(value, wanted, rtol=0, atol=1e-12)
    unweighted, _ = Objective(LOSS, MEAN, K3, beta=0.7)(x, totals, ref_logp=ref)
    assert abs((value - unweighted).item()) > 1e-3


@pytest.mark.parametrize("shape", [(ROWS, 1), None], ids=["per_sequence", "per_token"])
def test_sampler_weight_one_is_neutral_and_zero_counts_as_masked(
    shape: tuple[int, int] | None,
) -> None:
    x = loss_inputs()
    totals, objective = totals_of(x.mask), Objective(LOSS, MEAN, K3)
    ones = torch.ones(shape or x.logp.shape, dtype=torch.float64)
    value, metrics = objective(x, totals, sampler_weight=ones)
    assert_close(value, objective(x, totals)[0], rtol=0, atol=0)
    assert metrics["sampling/masked_frac"].sum() == 0
    ones[0, 0] = 0
    masked = objective(x, totals, sampler_weight=ones)[1]["sampling/masked_frac"]
    assert masked.shape == x.logp.shape
    assert masked.sum() == (x.logp.shape[1] if shape else 1)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_micro_batches_and_padding_change_nothing_with_all_on(preset: str) -> None:
    x = loss_inputs()
    totals, ref = totals_of(x.mask), reference(x)
    weight = SAMPLER_CORRECTIONS["token_truncate"](x.logp.detach(), x.old_logp, x.mask)
    whole = objective_of(preset, beta=0.1)

    def value(rows: slice, pad: int) -> Tensor:
        def cut(t: Tensor) -> Tensor:
            return torch.nn.functional.pad(t[rows], (0, pad))

        part = LossInputs(cut(x.logp), cut(x.old_logp), x.advantage[rows], cut(x.mask))
        return whole(part, totals, ref_logp=cut(ref), sampler_weight=cut(weight))[0]

    wanted = value(slice(None), 0)
    parts = sum((value(slice(i, i + 2), i) for i in range(0, ROWS, 2)), start=torch.zeros(()))
    assert_close(parts, wanted, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(v, x.logp)[0] for v in (parts, wanted)]
    assert_close(*gradients, rtol=0, atol=1e-12)
    assert not gradients[1][~x.mask].any()
    assert gradients[1].abs().max() > 1e-3


# The presets.

AXES = (("advantage", ADVANTAGES), ("policy_loss", POLICY_LOSSES), ("aggregation", AGGREGATIONS))


def axis(preset: str, name: str) -> Callable[..., Any]:
    point = PRESETS[preset]
    return dict(AXES)[name].build(getattr(point, name), **getattr(point, f"{name}_options"))


def objective_of(preset: str, beta: float = 0.0) -> Objective:
    return Objective(axis(preset, "policy_loss"), axis(preset, "aggregation"), K3, beta)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_names_members_and_options_that_exist(preset: str) -> None:
    for name, table in AXES:
        assert getattr(PRESETS[preset], name) in table
        assert callable(axis(preset, name))


# Two prompts, two completions each; the second completion has one token, and the last ratio is far out.
REWARD = [[1.0, 0.0], [3.0, 1.0]]
OLD = [[-1.0, -2.0], [-0.5, 0.0], [-1.5, -0.3], [-2.0, -1.0]]
LOG_RATIO = [[0.25, -0.4], [-0.5, 0.0], [0.1, 0.24], [0.5, -0.6]]
LENGTHS = [2, 1, 2, 2]
MAX_TOKENS = 8

ROOT = math.sqrt(2)  # the standard deviation of two rewards is their distance over sqrt 2
STANDARDIZED = [0.5 / (1 / ROOT + 1e-6), -0.5 / (1 / ROOT + 1e-6), 1 / (ROOT + 1e-6), -1 / (ROOT + 1e-6)]
CENTERED = [0.5, -0.5, 1.0, -1.0]


def clipped(low: float, high: float) -> Callable[[float, float, float], float]:
    def token_loss(a: float, log_ratio: float, logp: float) -> float:
        ratio = math.exp(log_ratio)
        return -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)

    return token_loss


def log_probability(a: float, log_ratio: float, logp: float) -> float:
    return -a * logp


def unclipped(a: float, log_ratio: float, logp: float) -> float:
    return -math.exp(log_ratio) * a


def capped(a: float, log_ratio: float, logp: float) -> float:
    return -min(math.exp(log_ratio), 5.0) * a * logp


def per_sequence(sums: Iterator[list[float]]) -> float:
    return sum(sum(row) / len(row) for row in sums) / 4


def per_token(sums: Iterator[list[float]]) -> float:
    return sum(map(sum, sums)) / 7


def over_max_tokens(sums: Iterator[list[float]]) -> float:
    return sum(map(sum, sums)) / (4 * MAX_TOKENS)


def over_sequences(sums: Iterator[list[float]]) -> float:
    return sum(map(sum, sums)) / 4


FORMULAS: dict[str, tuple[list[float], Callable[[float, float, float], float], Callable[..., float]]] = {
    "no_baseline": ([1.0, 0.0, 3.0, 1.0], log_probability, per_sequence),
    "reinforce_with_baseline": (STANDARDIZED, log_probability, per_sequence),
    "grpo_clip": (STANDARDIZED, clipped(0.2, 0.2), per_sequence),
    "grpo_no_clip": (STANDARDIZED, unclipped, per_sequence),
    "dr_grpo": (CENTERED, clipped(0.2, 0.2), over_max_tokens),
    "dapo": (STANDARDIZED, clipped(0.2, 0.28), per_token),
    "rloo": ([1.0, -1.0, 2.0, -2.0], log_probability, over_sequences),
    "gspo": (STANDARDIZED, clipped(3e-4, 4e-4), per_sequence),
    "cispo": (STANDARDIZED, capped, per_token),
    "max_rl": ([0.5 / 0.500001, -0.5 / 0.500001, 1 / 2.000001, -1 / 2.000001], log_probability, over_sequences),
}


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_is_its_formula(preset: str) -> None:
    advantages, token_loss, aggregate = FORMULAS[preset]
    log_ratios = [row[:n] for row, n in zip(LOG_RATIO, LENGTHS, strict=True)]
    if preset == "gspo":  # one ratio per sequence
        log_ratios = [[sum(row) / len(row)] * len(row) for row in log_ratios]
    logps = [[o + d for o, d in zip(*rows, strict=True)] for rows in zip(OLD, LOG_RATIO, strict=True)]
    wanted = aggregate(
        [token_loss(a, d, logp) for d, logp in zip(ratios, row, strict=False)]
        for a, ratios, row in zip(advantages, log_ratios, logps, strict=True)
    )
    old, ratio = torch.tensor(OLD, dtype=torch.float64), torch.tensor(LOG_RATIO, dtype=torch.float64)
    mask = torch.arange(2) < torch.tensor(LENGTHS)[:, None]
    advantage = axis(preset, "advantage")(torch.tensor(REWARD, dtype=torch.float64)).view(-1, 1)
    x = LossInputs((old + ratio).requires_grad_(), old, advantage, mask)
    value, _ = objective_of(preset)(x, StepTotals(sequences=4, tokens=7, max_tokens=MAX_TOKENS))
    assert value.item() == pytest.approx(wanted, abs=1e-12)


def test_a_preset_cannot_be_changed_by_accident() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["dapo"].advantage = "raw"  # type: ignore[misc]
