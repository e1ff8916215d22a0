"""Contracts of every policy loss, with their exceptions; then values worked by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.support.cases import loss_inputs, ragged_mask
from trl_ext.algorithms.policy_losses import POLICY_LOSSES
from trl_ext.algorithms.types import LossInputs, TokenLoss

EVERY = sorted(POLICY_LOSSES)
PER_SEQUENCE = {"gspo"}  # one ratio per sequence, so a token's loss depends on its neighbors
IGNORES_OLD = {"reinforce"}
UNBOUNDED = {"reinforce", "importance_ratio"}  # never clipped
STOPS_GRADIENT = {"cispo"}  # its derivative treats the ratio as a constant, so finite differences are not its gradient


def gradient(loss: TokenLoss, x: LossInputs) -> Tensor:
    """Of the loss summed over unmasked tokens."""
    return torch.autograd.grad((loss.loss * x.mask).sum(), x.logp)[0]


def one_token(ratio: float, advantage: float) -> LossInputs:
    logp = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(1, 1, dtype=torch.float64)
    return LossInputs(logp, zeros, zeros + advantage, torch.ones(1, 1, dtype=torch.bool))


# Contracts.


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", EVERY)
def test_loss_and_metrics_are_per_token_and_only_loss_has_grad(name: str, per_token: bool) -> None:
    x = loss_inputs(per_token=per_token)
    result = POLICY_LOSSES.build(name)(x)
    assert (result.loss.shape, result.loss.dtype) == (x.logp.shape, torch.float64)
    assert result.loss.requires_grad
    for value in result.metrics.values():
        assert value.shape == x.logp.shape
        assert not value.requires_grad


# A sequence ratio divides a sequence's advantages among its tokens, so there it is one advantage per sequence only.
@pytest.mark.parametrize(
    ("name", "per_token"), [(n, t) for n in EVERY for t in (False, True) if not (t and n in PER_SEQUENCE)]
)
def test_on_policy_the_gradient_is_that_of_reinforce(name: str, per_token: bool) -> None:
    x = loss_inputs(off_policy=0.0, per_token=per_token)
    actual = gradient(POLICY_LOSSES.build(name)(x), x)
    assert_close(actual, -(x.advantage * x.mask), rtol=0, atol=1e-12)
    assert actual.abs().max() > 0.1


@pytest.mark.parametrize("name", sorted(set(EVERY) - IGNORES_OLD))
def test_off_policy_the_gradient_is_another(name: str) -> None:
    x = loss_inputs(off_policy=0.5)
    assert (gradient(POLICY_LOSSES.build(name)(x), x) + x.advantage * x.mask).abs().max() > 0.05


@pytest.mark.parametrize("off_policy", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("name", sorted(set(EVERY) - STOPS_GRADIENT))
def test_the_gradient_is_the_derivative(name: str, off_policy: float) -> None:
    x = loss_inputs(off_policy)
    if off_policy == 0 and name != "reinforce":
        x = dataclasses.replace(x, old_logp=x.old_logp + 1e-5)  # next to the kink of a clip at 1, not on it

    def total(logp: Tensor) -> Tensor:
        return (POLICY_LOSSES.build(name)(dataclasses.replace(x, logp=logp)).loss * x.mask).sum()

    assert torch.autograd.gradcheck(total, (x.logp,))


@pytest.mark.parametrize("name", EVERY)
def test_a_zero_advantage_has_neither_loss_nor_gradient(name: str) -> None:
    x = loss_inputs(0.5)
    x = dataclasses.replace(x, advantage=torch.zeros_like(x.advantage))
    function = POLICY_LOSSES.build(name)
    assert function.zero_advantage_is_noop  # declared, which this test holds
    loss = function(x)
    assert loss.loss.abs().max() == 0
    assert gradient(loss, x).abs().max() == 0
    assert all(value.abs().max() == 0 for value in loss.metrics.values())


@pytest.mark.parametrize("name", sorted(set(EVERY) - UNBOUNDED))
def test_gradient_is_small_for_ratios_past_the_clip_range(name: str) -> None:
    for ratio, sign in ((100.0, 1.0), (0.01, -1.0)):
        x = one_token(ratio, sign)
        loss = POLICY_LOSSES.build(name)(x)
        bound = 5.0 if name == "cispo" else 0.1  # cispo keeps a gradient, but at most ratio_max
        assert gradient(loss, x).abs().item() <= bound


@pytest.mark.parametrize("name", EVERY)
def test_masked_tokens_never_matter(name: str) -> None:
    x = loss_inputs(0.5)
    poisoned = x.logp.detach().masked_fill(~x.mask, -50.0).requires_grad_()
    y = dataclasses.replace(x, logp=poisoned, old_logp=x.old_logp.masked_fill(~x.mask, -49.0))
    loss = POLICY_LOSSES.build(name)
    assert_close(loss(y).loss[x.mask], loss(x).loss[x.mask], rtol=0, atol=0)
    assert_close(gradient(loss(y), y), gradient(loss(x), x), rtol=0, atol=0)
    for key, value in loss(x).metrics.items():
        assert_close(loss(y).metrics[key][x.mask], value[x.mask], rtol=0, atol=0)


@pytest.mark.parametrize("name", EVERY)
def test_padding_and_the_order_of_rows_change_nothing(name: str) -> None:
    x, loss = loss_inputs(0.5), POLICY_LOSSES.build(name)
    wanted = loss(x).loss * x.mask
    pad = torch.nn.functional.pad
    wider = LossInputs(pad(x.logp, (0, 3)), pad(x.old_logp, (0, 3)), x.advantage, pad(x.mask, (0, 3)))
    # a sum over more zeros may be taken in another order
    assert_close((loss(wider).loss * wider.mask)[:, : x.mask.shape[1]], wanted, rtol=0, atol=1e-14)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    moved = LossInputs(x.logp[order], x.old_logp[order], x.advantage[order], x.mask[order])
    assert_close(loss(moved).loss * moved.mask, wanted[order], rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted(set(EVERY) - PER_SEQUENCE))
def test_a_token_does_not_see_the_others(name: str) -> None:
    x, loss = loss_inputs(0.5), POLICY_LOSSES.build(name)
    last = LossInputs(x.logp[:, -1:], x.old_logp[:, -1:], x.advantage, x.mask[:, -1:])
    assert_close(loss(last).loss, loss(x).loss[:, -1:], rtol=0, atol=0)


# Values. The gradient is with respect to logp, so d(-r A) = -r A.


@pytest.mark.parametrize(
    ("name", "options", "ratio", "advantage", "loss", "slope"),
    [
        ("reinforce", {}, 2.0, 3.0, -3 * math.log(2), -3.0),
        ("importance_ratio", {}, 2.0, 3.0, -6.0, -6.0),
        ("importance_ratio", {}, 0.5, -3.0, 1.5, 1.5),
        # clipped above for a good token, below for a bad one; not the other way round
        ("ppo_clip", {}, 1.5, 2.0, -2.4, 0.0),
        ("ppo_clip", {}, 0.5, 2.0, -1.0, -1.0),
        ("ppo_clip", {}, 1.5, -2.0, 3.0, 3.0),
        ("ppo_clip", {}, 0.5, -2.0, 1.6, 0.0),
        ("ppo_clip", {}, 1.1, 2.0, -2.2, -2.2),
        ("ppo_clip", {"eps_high": 0.28}, 1.25, 1.0, -1.25, -1.25),
        ("ppo_clip", {"eps_high": 0.28}, 1.5, 1.0, -1.28, 0.0),
        ("ppo_clip", {"eps_low": 0.1, "eps_high": 0.28}, 0.5, -1.0, 0.9, 0.0),
        # dual clip: a bad token that became much more likely pushes no further than dual_clip
        ("ppo_clip", {"dual_clip": 3.0}, 5.0, -2.0, 6.0, 0.0),
        ("ppo_clip", {"dual_clip": 3.0}, 2.5, -2.0, 5.0, 5.0),
        ("ppo_clip", {"dual_clip": 3.0}, 5.0, 2.0, -2.4, 0.0),
        ("gspo", {}, 1.5, 2.0, -2 * 1.0004, 0.0),
        ("gspo", {}, 0.5, -2.0, 2 * 0.9997, 0.0),
        ("gspo", {"eps_high": 1.0}, 1.5, 2.0, -3.0, -3.0),
        ("cispo", {}, 2.0, 3.0, -6 * math.log(2), -6.0),
        ("cispo", {}, 8.0, 3.0, -15 * math.log(8), -15.0),
        ("cispo", {"ratio_max": 2.0}, 8.0, -3.0, 6 * math.log(8), 6.0),
        ("sapo", {}, 1.0, 3.0, -6.0, -3.0),  # at ratio 1: -(4 / tau) / 2 A, slope -A
        ("sapo", {}, 1.0, -3.0, 6.0 / 1.05, 3.0),
        ("sapo", {}, 2.0, 1.0, -4 / (1 + math.exp(-1)), -8 * math.e / (1 + math.e) ** 2),
        ("sapo", {"temperature_neg": 2.0}, 2.0, -1.0, 2 / (1 + math.exp(-2)), 8 * math.e**2 / (1 + math.e**2) ** 2),
        ("sapo", {"temperature_pos": 0.5}, 1.0, 1.0, -4.0, -1.0),
    ],
)
def test_values_by_hand(
    name: str, options: dict[str, float], ratio: float, advantage: float, loss: float, slope: float
) -> None:
    x = one_token(ratio, advantage)
    result = POLICY_LOSSES.build(name, **options)(x)
    assert result.loss.item() == pytest.approx(loss, abs=1e-12)
    assert gradient(result, x).item() == pytest.approx(slope, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high"),
    [(1.5, 1.0, 0, 1), (1.2, 1.0, 0, 0), (1.5, -1.0, 0, 0), (0.5, 1.0, 0, 0), (0.85, -1.0, 1, 0), (1.5, 0.0, 0, 0)],
)
@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
def test_what_is_logged_as_clipped_is_what_lost_its_gradient(
    name: str, ratio: float, advantage: float, low: int, high: int
) -> None:
    x = one_token(ratio, advantage)
    result = POLICY_LOSSES.build(name, eps_low=0.1, eps_high=0.3)(x)
    logged = {key: value.item() for key, value in result.metrics.items()}
    assert logged == {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
    }
    if advantage:
        assert (gradient(result, x).item() == 0) == bool(low + high)


@pytest.mark.parametrize(("ratio", "advantage", "capped"), [(8.0, 1.0, 1), (8.0, -1.0, 0), (2.0, 1.0, 0)])
def test_cispo_logs_the_good_tokens_whose_ratio_it_capped(ratio: float, advantage: float, capped: int) -> None:
    x = one_token(ratio, advantage)
    metrics = POLICY_LOSSES.build("cispo")(x).metrics
    assert {key: value.item() for key, value in metrics.items()} == {"clip_ratio/high_mean": capped}


def test_gspo_ratio_is_the_geometric_mean_over_unmasked_tokens() -> None:
    # log-ratios 0.1 and 0.3 count, 5 is masked: s = exp(0.2); the second row has no token
    logp = torch.tensor([[0.1, 5.0, 0.3], [1.0, 1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, False, True], [False] * 3])
    x = LossInputs(logp, torch.zeros_like(logp).detach(), torch.tensor([[2.0], [2.0]], dtype=torch.float64), mask)
    result = POLICY_LOSSES.build("gspo", eps_high=1.0)(x)
    assert_close(result.loss[0], torch.full((3,), -2 * math.exp(0.2), dtype=torch.float64), rtol=0, atol=1e-12)
    # two tokens, each with s / 2 of either gradient
    assert gradient(result, x).tolist() == [
        [pytest.approx(-2 * math.exp(0.2)), 0.0, pytest.approx(-2 * math.exp(0.2))],
        [0.0] * 3,
    ]


# What a loss may be given.


def inputs(**changes: Tensor) -> LossInputs:
    row = {
        "logp": torch.zeros(3, 3), "old_logp": torch.zeros(3, 3), "advantage": torch.zeros(3, 1),
        "mask": ragged_mask()[:3, :3],
    }  # fmt: skip
    return LossInputs(**{**row, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # (3,) would broadcast over the tokens without an error
        ({"advantage": torch.zeros(3)}, r"advantage must be \(3, 1\) or \(3, 3\), got \(3,\)"),
        ({"advantage": torch.zeros(1, 3)}, r"advantage must be \(3, 1\) or \(3, 3\), got \(1, 3\)"),
        ({"old_logp": torch.zeros(3, 1)}, r"old_logp must be \(3, 3\), got \(3, 1\)"),
        ({"mask": torch.ones(3, 1, dtype=torch.bool)}, r"mask must be \(3, 3\), got \(3, 1\)"),
        ({"logp": torch.zeros(3)}, r"logp must be \(B, T\), got \(3,\)"),
        ({"mask": torch.ones(3, 3)}, r"mask must be boolean, got torch.float32"),
        ({"mask": torch.ones(3, 3, dtype=torch.long)}, r"mask must be boolean, got torch.int64"),
        ({"old_logp": torch.zeros(3, 3, requires_grad=True)}, "old_logp must not carry a gradient; detach it"),
    ],
)
def test_inputs_of_another_shape_or_kind_are_refused(changes: dict[str, Tensor], message: str) -> None:
    assert inputs().mask.dtype == torch.bool
    with pytest.raises(ValueError, match=message):
        inputs(**changes)
