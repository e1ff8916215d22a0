"""The scalar that is differentiated, and each preset against its formula in plain Python."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.support.cases import ROWS, loss_inputs, policy_loss, totals_of
from trl_ext.algorithms.advantages import ADVANTAGES
from trl_ext.algorithms.aggregation import AGGREGATIONS
from trl_ext.algorithms.entropy import EntropyController
from trl_ext.algorithms.kl import KL_ESTIMATORS
from trl_ext.algorithms.objective import Objective, keeps_on_policy
from trl_ext.algorithms.policy_losses import POLICY_LOSSES
from trl_ext.algorithms.presets import PRESETS
from trl_ext.algorithms.sampler_correction import SAMPLER_WEIGHTS
from trl_ext.algorithms.types import LossInputs, StepTokens, StepTotals, TokenLoss
from trl_ext.grpo.config import ExtGRPOConfig
from trl_ext.io import read_yaml

LOSS, MEAN, K3 = POLICY_LOSSES["ppo_clip"], AGGREGATIONS["sequence_mean"], KL_ESTIMATORS["k3"]


def reference(x: LossInputs) -> Tensor:
    return x.old_logp + 0.3 * torch.cos(torch.arange(x.logp.numel(), dtype=torch.float64)).view_as(x.logp)


# The parts.


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
def test_without_extras_it_is_the_aggregated_policy_loss(loss: str, aggregation: str) -> None:
    x = loss_inputs()
    totals = totals_of(x.mask)
    value, metrics = Objective(POLICY_LOSSES[loss], AGGREGATIONS[aggregation], K3)(x, totals, step=StepTokens.of(x))
    alone = policy_loss(loss)(x)
    assert_close(value, AGGREGATIONS[aggregation](alone.loss, x.mask, totals), rtol=0, atol=0)
    assert metrics.keys() == alone.metrics.keys()
    assert not any(metric.requires_grad for metric in metrics.values())


def test_a_metric_with_a_gradient_keeps_no_graph() -> None:
    """As a user's loss returns it; kept until the step is logged, it would hold all of its activations."""
    x = loss_inputs()
    objective = Objective(lambda x: TokenLoss(-x.logp, {"mine": x.logp * 2}), MEAN, K3)
    _, metrics = objective(dataclasses.replace(x, logp=x.logp.detach().requires_grad_()), totals_of(x.mask))
    assert not metrics["mine"].requires_grad


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
    wanted, _ = objective(x, totals, ref_logp=ref, step=StepTokens.of(x))
    logp = x.logp.detach().masked_fill(~x.mask, poison).requires_grad_()
    y = dataclasses.replace(x, logp=logp)
    value, _ = objective(y, totals, ref_logp=ref, step=StepTokens.of(y))
    assert_close(value, wanted, rtol=0, atol=0)
    assert_close(torch.autograd.grad(value, logp), torch.autograd.grad(wanted, x.logp), rtol=0, atol=0)


def test_the_off_policy_mask_by_hand() -> None:
    """Means of log(pi_sampled / pi) 0.3, 0.3 and 0.1, where a masked 9 and an unknown token count as nothing and 0."""
    logp = torch.tensor([[-1.0, -1.0, -9.0], [-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]], dtype=torch.float64)
    sampled = torch.tensor([[-0.8, -0.6, 0.0], [-0.8, -0.6, -0.7], [-0.7, math.nan, -1.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True] * 3, [True] * 3])
    for advantage, kept in (([-1, 1, -1], [False, True, True]), ([0, -1, -1], [True, False, True])):
        x = LossInputs(logp, logp, torch.tensor(advantage, dtype=torch.float64)[:, None], mask)
        assert keeps_on_policy(x, sampled, 0.2)[:, 0].tolist() == kept


def test_the_entropy_controller_by_hand() -> None:
    """Three trained tokens of 1, 2 and 6 nats over two micro-batches: 3 in the mean; a masked NaN is left out."""
    controller = EntropyController(target=3.0, delta=0.1, lowest=0.0, highest=0.25)
    ranks: list[list[float]] = []

    def add() -> None:
        entropy = torch.tensor([[1.0, math.nan]])
        controller.add(entropy, entropy.isfinite())
        controller.add(torch.tensor([[2.0, 6.0]]), torch.ones(1, 2, dtype=torch.bool))

    def summed(sums: Tensor) -> Tensor:
        ranks.append(sums.tolist())
        return 2 * sums  # of another rank as well

    for before, after in ((0.1, 0.2), (0.2, 0.25)):  # at the target raised, up to the highest
        add()
        assert controller.finish(before, summed) == (pytest.approx(after), 3.0)
    assert ranks == [[9.0, 3.0]] * 2  # and from 0 in each step
    controller.target = 2.9
    for before, after in ((0.25, 0.15), (0.05, 0.0)):
        add()
        assert controller.finish(before, summed)[0] == pytest.approx(after)


def test_a_penalty_without_reference_is_refused() -> None:
    x = loss_inputs()
    with pytest.raises(ValueError, match=r"beta is 0\.05, so the objective needs ref_logp"):
        Objective(LOSS, MEAN, K3, beta=0.05)(x, totals_of(x.mask))


@pytest.mark.parametrize("loss", ["dppo_tv", "dppo_kl", "vespo"])
def test_token_without_sampler_logp_counts_as_of_the_old_policy(loss: str) -> None:
    x = loss_inputs()
    objective, totals = Objective(POLICY_LOSSES[loss], MEAN, K3), totals_of(x.mask)
    sampled = x.old_logp + 0.1
    unknown, filled = sampled.clone(), sampled.clone()
    unknown[:, 0], filled[:, 0] = math.nan, x.old_logp[:, 0]
    values = [objective(x, totals, sampled_logp=given)[0] for given in (unknown, filled, sampled)]
    assert_close(values[0], values[1], rtol=0, atol=0)
    assert abs((values[2] - values[1]).item()) > 1e-6


@pytest.mark.parametrize("correction", ["sequence", "token"])
def test_sampler_weight_scales_policy_term_and_not_kl_penalty(correction: str) -> None:
    x = loss_inputs()
    totals, ref = totals_of(x.mask), reference(x)
    weight = SAMPLER_WEIGHTS.build(correction)(x.logp.detach(), x.old_logp, x.mask)
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


IN_NO_PRESET = sorted(set(POLICY_LOSSES) - {preset.policy_loss for preset in PRESETS.values()})


@pytest.mark.parametrize("preset", [*sorted(PRESETS), *IN_NO_PRESET])
def test_micro_batches_and_padding_change_nothing_with_all_on(preset: str) -> None:
    x = loss_inputs()
    totals, ref = totals_of(x.mask), reference(x)
    weight = SAMPLER_WEIGHTS["token"](x.logp.detach(), x.old_logp, x.mask)
    step = StepTokens.of(x)
    whole = Objective(POLICY_LOSSES[preset], MEAN, K3, 0.1) if preset in IN_NO_PRESET else objective_of(preset, 0.1)

    def value(rows: slice, pad: int) -> Tensor:
        def cut(t: Tensor) -> Tensor:
            return torch.nn.functional.pad(t[rows], (0, pad))

        part = LossInputs(cut(x.logp), cut(x.old_logp), x.advantage[rows], cut(x.mask))
        tokens = dataclasses.replace(step, place=torch.nn.functional.pad(step.place[rows], (0, pad), value=-1))
        return whole(part, totals, ref_logp=cut(ref), sampler_weight=cut(weight), step=tokens)[0]

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


# The loss of each token of a sequence, from its advantage, and the log-ratios and log-probabilities of its tokens.
Losses = Callable[[float, list[float], list[float]], list[float]]


def each(token_loss: Callable[[float, float, float], float]) -> Losses:
    """A loss of the token alone, from the advantage, its ratio and its log-probability."""
    return lambda a, log_ratios, logps: [token_loss(a, math.exp(d), p) for d, p in zip(log_ratios, logps, strict=True)]


def clipped(low: float, high: float) -> Callable[[float, float, float], float]:
    return lambda a, ratio, logp: -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)


def of_sequence(low: float, high: float) -> Losses:
    """GSPO: the clipped loss of the geometric mean of the ratios, at every token."""
    return lambda a, log_ratios, logps: [
        clipped(low, high)(a, math.exp(sum(log_ratios) / len(log_ratios)), 0.0) for _ in log_ratios
    ]


def geometric_mean(a: float, log_ratios: list[float], logps: list[float]) -> list[float]:
    bounded = [min(d, 0.4) if a > 0 else max(d, -0.4) for d in log_ratios]
    return [-a * math.exp(sum(bounded) / len(bounded))] * len(bounded)


def gradient_preserving(a: float, ratio: float, logp: float) -> float:
    if a > 0 and ratio > 1.2:
        return -1.0 * 1.2 * a
    return -0.75 * 0.8 * a if a < 0 and ratio < 0.8 else -ratio * a


def flipped(a: float, ratio: float, logp: float) -> float:
    if (a > 0 and ratio > 1.2) or (a < 0 and ratio < 0.8):
        return 0.0
    return -min(1 / ratio if a > 0 else ratio, 3.0) * a


def reshaped(a: float, log_ratios: list[float], logps: list[float]) -> list[float]:
    w, (k, decay) = math.exp(sum(log_ratios)), (2, 3) if a >= 0 else (3, 2)
    return [-(w**k) * math.exp(decay * (1 - w)) * a * logp for logp in logps]


def trusted(a: float, ratio: float, logp: float) -> float:
    is_far = abs(math.exp(logp) - math.exp(logp) / ratio) > 0.2
    return 0.0 if is_far and (ratio - 1) * a > 0 else -ratio * a


SCORE = each(lambda a, ratio, logp: -a * logp)
UNCLIPPED = each(lambda a, ratio, logp: -ratio * a)
CAPPED = each(lambda a, ratio, logp: -min(ratio, 5.0) * a * logp)
PPO = each(clipped(0.2, 0.2))


def per_sequence(sums: Iterator[list[float]]) -> float:
    return sum(sum(row) / len(row) for row in sums) / 4


def per_token(sums: Iterator[list[float]]) -> float:
    return sum(map(sum, sums)) / 7


def over_max_tokens(sums: Iterator[list[float]]) -> float:
    return sum(map(sum, sums)) / (4 * MAX_TOKENS)


def over_sequences(sums: Iterator[list[float]]) -> float:
    return sum(map(sum, sums)) / 4


OF_BATCH = math.sqrt(sum(a * a for a in STANDARDIZED) / 3) + 1e-6
FORMULAS: dict[str, tuple[list[float], Losses, Callable[..., float]]] = {
    "no_baseline": ([1.0, 0.0, 3.0, 1.0], SCORE, per_sequence),
    "reinforce_with_baseline": (STANDARDIZED, SCORE, per_sequence),
    "grpo_clip": (STANDARDIZED, PPO, per_sequence),
    "grpo_no_clip": (STANDARDIZED, UNCLIPPED, per_sequence),
    "dr_grpo": (CENTERED, PPO, over_max_tokens),
    **dict.fromkeys(("dapo", "dapo_full"), (STANDARDIZED, each(clipped(0.2, 0.28)), per_token)),
    "rloo": ([1.0, -1.0, 2.0, -2.0], SCORE, over_sequences),
    "gspo": (STANDARDIZED, of_sequence(3e-4, 4e-4), per_sequence),
    "gspo_token": (STANDARDIZED, of_sequence(3e-4, 4e-4), per_sequence),
    "luspo": (STANDARDIZED, of_sequence(3e-4, 4e-4), over_sequences),
    "gmpo": (STANDARDIZED, geometric_mean, per_sequence),
    "cispo": (STANDARDIZED, CAPPED, per_token),
    "ce_gppo": (STANDARDIZED, each(gradient_preserving), per_token),
    "aspo": (STANDARDIZED, each(flipped), per_token),
    "vespo": (STANDARDIZED, reshaped, per_token),
    "dppo": (CENTERED, each(trusted), over_max_tokens),
    "max_rl": ([0.5 / 0.500001, -0.5 / 0.500001, 1 / 2.000001, -1 / 2.000001], SCORE, over_sequences),
    "gdpo": ([a / OF_BATCH for a in STANDARDIZED], PPO, per_sequence),
    # mean 5/4, squares 1/16, 25/16, 49/16, 1/16
    "reinforce_plus_plus": ([(r - 1.25) / (math.sqrt(76 / 48) + 1e-6) for r in (1, 0, 3, 1)], PPO, per_sequence),
    "reinforce_plus_plus_baseline": ([a / (math.sqrt(2.5 / 3) + 1e-6) for a in CENTERED], PPO, per_sequence),
    "opo": ([1 - 2 / 3, -2 / 3, 1, -1], SCORE, over_sequences),  # baselines 1 * 2 / 3 and (3 * 2 + 1 * 2) / 4
    "w_reinforce": ([0.1, -1, 0.1, 0.1], SCORE, over_sequences),
    "pkpo": ([1, 0, 2, 0], SCORE, over_sequences),  # what the better one of two adds
    # without what the teacher adds, of which are tests/grpo/test_distillation.py
    "opd": ([0.0] * 4, UNCLIPPED, per_token),
    "gkd": ([0.0] * 4, SCORE, per_token),
    "opd_grpo": (STANDARDIZED, PPO, per_token),
}


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_is_its_formula(preset: str) -> None:
    advantages, losses, aggregate = FORMULAS[preset]
    rows = [
        (a, ratios[:n], [o + d for o, d in zip(olds, ratios, strict=True)][:n])
        for a, ratios, olds, n in zip(advantages, LOG_RATIO, OLD, LENGTHS, strict=True)
    ]
    wanted = aggregate([losses(*row) for row in rows])
    old, ratio = torch.tensor(OLD, dtype=torch.float64), torch.tensor(LOG_RATIO, dtype=torch.float64)
    mask = torch.arange(2) < torch.tensor(LENGTHS)[:, None]
    reward, lengths = (torch.tensor(x, dtype=torch.float64).view(2, 2) for x in (REWARD, LENGTHS))
    inputs = {"rewards": reward[:, :, None], "weights": reward.new_ones(1), "lengths": lengths}
    member = ADVANTAGES.build(PRESETS[preset].advantage, **({"k": 2} if preset == "pkpo" else {}))
    advantage = member(reward, **{name: inputs[name] for name in ADVANTAGES.inputs_of(member)}).view(-1, 1)
    x = LossInputs((old + ratio).requires_grad_(), old, advantage, mask)
    value, _ = objective_of(preset)(x, StepTotals(sequences=4, tokens=7, max_tokens=MAX_TOKENS))
    assert value.item() == pytest.approx(wanted, abs=1e-12)


def test_every_preset_has_its_source() -> None:
    told = read_yaml(Path(__file__).parents[2] / "docs" / "site" / "algorithms.yaml")["preset"]
    assert list(told) == list(PRESETS)
    for name, row in told.items():
        assert set(row) == {"paper", "code", "differs"}, name
        assert re.match(r"\d{4}\.\d{5}|the course|Lu et al|none", row["paper"]), name
        assert re.search(r"`[\w.-]+/[\w.-]+`|none found|the same|listing|none", row["code"]), name


def test_a_preset_cannot_be_changed_by_accident() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["dapo"].advantage = "raw"  # type: ignore[misc]


def test_a_mean_over_tokens_does_not_grow_with_the_length() -> None:
    """Authors' code divides by the tokens or by the longest length; a sum would be hundreds of times larger."""

    def slope(preset: str, length: int) -> float:
        old = torch.full((2, length), -1.0, dtype=torch.float64)
        logp = old.clone().requires_grad_()
        x = LossInputs(logp, old, torch.tensor([[1.0], [-1.0]], dtype=torch.float64), torch.ones(2, length) > 0)
        value, _ = objective_of(preset)(x, StepTotals(sequences=2, tokens=2 * length, max_tokens=length))
        (gradient,) = torch.autograd.grad(value, logp)
        return float(gradient.abs().sum())

    for preset in ("grpo_clip", "dapo", "ce_gppo", "aspo", "vespo", "dppo", "cispo", "gmpo", "gspo"):
        assert slope(preset, 512) == pytest.approx(1.0), preset
