"""Contracts of every policy loss, with their exceptions; then values worked by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.support.cases import loss_inputs, policy_loss, ragged_mask
from trl_ext.algorithms.policy_losses import POLICY_LOSSES
from trl_ext.algorithms.types import LossInputs, TokenLoss

EVERY = sorted(POLICY_LOSSES)
PER_SEQUENCE = {"gspo", "gmpo"}  # one ratio per sequence, which has to have one advantage too
OF_STEP = {"kl_cov", "clip_cov", "bapo"}  # they choose tokens or bounds from all tokens of the step
SEES_OTHERS = {*PER_SEQUENCE, *OF_STEP, "gspo_token", "vespo"}  # a token's loss depends on others
IGNORES_OLD = {"reinforce"}
UNBOUNDED = {"reinforce", "importance_ratio", "kl_cov"}  # never clipped
BOUNDED_BY = {"cispo": 5.0, "ce_gppo": 1.2}  # these keep a gradient outside the clip range, at most this
# Their derivative treats a factor as a constant, so finite differences are not their gradient.
STOPS_GRADIENT = {"cispo", "gspo_token", "ce_gppo", "aspo", "vespo"}


def gradient(loss: TokenLoss, x: LossInputs) -> Tensor:
    """Of the loss summed over unmasked tokens."""
    return torch.autograd.grad((loss.loss * x.mask).sum(), x.logp)[0]


def one_token(ratio: float, advantage: float, old: float = 1.0) -> LossInputs:
    """A token of the probability `old` under the old policy."""
    logp = torch.tensor([[math.log(ratio * old)]], dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(1, 1, dtype=torch.float64)
    return LossInputs(logp, zeros + math.log(old), zeros + advantage, torch.ones(1, 1, dtype=torch.bool))


# Contracts.


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", EVERY)
def test_loss_and_metrics_are_per_token_and_only_loss_has_grad(name: str, per_token: bool) -> None:
    x = loss_inputs(per_token=per_token)
    result = policy_loss(name)(x)
    assert (result.loss.shape, result.loss.dtype) == (x.logp.shape, torch.float64)
    assert result.loss.requires_grad
    for value in result.metrics.values():
        assert value.shape == x.logp.shape
        assert not value.requires_grad


# A sequence ratio divides a sequence's advantages among its tokens, so there it is one advantage per sequence only.
@pytest.mark.parametrize(
    ("name", "per_token"),
    [(n, t) for n in EVERY for t in (False, True) if not (t and n in PER_SEQUENCE) and n != "clip_cov"],
)
def test_on_policy_the_gradient_is_that_of_reinforce(name: str, per_token: bool) -> None:
    x = loss_inputs(off_policy=0.0, per_token=per_token)
    actual = gradient(policy_loss(name)(x), x)
    assert_close(actual, -(x.advantage * x.mask), rtol=0, atol=1e-12)
    assert actual.abs().max() > 0.1


@pytest.mark.parametrize("name", sorted(set(EVERY) - IGNORES_OLD))
def test_off_policy_the_gradient_is_another(name: str) -> None:
    x = loss_inputs(off_policy=0.5)
    assert (gradient(policy_loss(name)(x), x) + x.advantage * x.mask).abs().max() > 0.05


@pytest.mark.parametrize("off_policy", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("name", sorted(set(EVERY) - STOPS_GRADIENT))
def test_the_gradient_is_the_derivative(name: str, off_policy: float) -> None:
    x = loss_inputs(off_policy)
    if off_policy == 0 and name != "reinforce":
        x = dataclasses.replace(x, old_logp=x.old_logp + 1e-5)  # next to the kink of a clip at 1, not on it

    def total(logp: Tensor) -> Tensor:
        return (policy_loss(name)(dataclasses.replace(x, logp=logp)).loss * x.mask).sum()

    assert torch.autograd.gradcheck(total, (x.logp,))


@pytest.mark.parametrize("name", sorted(set(EVERY) - OF_STEP))
def test_a_zero_advantage_has_neither_loss_nor_gradient(name: str) -> None:
    x = loss_inputs(0.5)
    x = dataclasses.replace(x, advantage=torch.zeros_like(x.advantage))
    function = policy_loss(name)
    assert function.zero_advantage_is_noop  # declared, which this test holds
    loss = function(x)
    assert loss.loss.abs().max() == 0
    assert gradient(loss, x).abs().max() == 0
    assert all(value.abs().max() == 0 for value in loss.metrics.values())


@pytest.mark.parametrize("name", sorted(OF_STEP))
def test_a_row_of_zero_advantage_matters_to_the_others(name: str) -> None:
    """Its tokens are in the means, or its loss has a gradient, so a step must not leave it out."""
    x = loss_inputs(0.5)
    function = policy_loss(name)
    assert not getattr(function, "zero_advantage_is_noop", False)
    zero = dataclasses.replace(x, advantage=torch.zeros_like(x.advantage))
    assert gradient(function(zero), zero).abs().max().item() == (1.0 if name == "kl_cov" else 0.0)


@pytest.mark.parametrize("name", sorted(set(EVERY) - UNBOUNDED))
def test_gradient_is_small_for_ratios_past_the_clip_range(name: str) -> None:
    for ratio, sign, old in ((100.0, 1.0, 0.005), (0.01, -1.0, 0.5)):
        x = one_token(ratio, sign, old)
        assert gradient(policy_loss(name)(x), x).abs().item() <= BOUNDED_BY.get(name, 0.1)


@pytest.mark.parametrize("name", EVERY)
def test_masked_tokens_never_matter(name: str) -> None:
    x = loss_inputs(0.5)
    poisoned = x.logp.detach().masked_fill(~x.mask, -50.0).requires_grad_()
    y = dataclasses.replace(x, logp=poisoned, old_logp=x.old_logp.masked_fill(~x.mask, -49.0))
    loss = policy_loss(name)
    assert_close(loss(y).loss[x.mask], loss(x).loss[x.mask], rtol=0, atol=0)
    assert_close(gradient(loss(y), y), gradient(loss(x), x), rtol=0, atol=0)
    for key, value in loss(x).metrics.items():
        assert_close(loss(y).metrics[key][x.mask], value[x.mask], rtol=0, atol=0)


@pytest.mark.parametrize("name", EVERY)
def test_padding_and_the_order_of_rows_change_nothing(name: str) -> None:
    x, loss = loss_inputs(0.5), policy_loss(name)
    wanted = loss(x).loss * x.mask
    pad = torch.nn.functional.pad
    wider = LossInputs(pad(x.logp, (0, 3)), pad(x.old_logp, (0, 3)), x.advantage, pad(x.mask, (0, 3)))
    # a sum over more zeros may be taken in another order
    assert_close((loss(wider).loss * wider.mask)[:, : x.mask.shape[1]], wanted, rtol=0, atol=1e-14)
    if name == "clip_cov":
        return  # it draws by the order of the step's tokens, which is the rollout's, see tests/grpo/test_step_tokens.py
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    moved = LossInputs(x.logp[order], x.old_logp[order], x.advantage[order], x.mask[order])
    assert_close(loss(moved).loss * moved.mask, wanted[order], rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted(set(EVERY) - SEES_OTHERS))
def test_a_token_does_not_see_the_others(name: str) -> None:
    x, loss = loss_inputs(0.5), policy_loss(name)
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
        # GSPO-token: for one token the same, whose gradient is the token's own
        ("gspo_token", {}, 1.5, 2.0, -2 * 1.0004, 0.0),
        ("gspo_token", {}, 0.99965, -1.0, 0.9997, 0.0),
        ("gspo_token", {"eps_high": 1.0}, 1.5, 2.0, -3.0, -3.0),
        # GMPO: log r is at most 0.4 for a good token, at least -0.4 for a bad one
        ("gmpo", {}, 2.0, 1.0, -math.exp(0.4), 0.0),
        ("gmpo", {}, 0.5, 1.0, -0.5, -0.5),
        ("gmpo", {}, 0.5, -1.0, math.exp(-0.4), 0.0),
        ("gmpo", {}, 2.0, -1.0, 2.0, 2.0),
        ("gmpo", {"eps_low": 0.1}, 0.5, -1.0, math.exp(-0.1), 0.0),
        # CE-GPPO: outside, beta times the bound instead of the ratio: 0.75 * 0.8 and 1 * 1.2
        ("ce_gppo", {}, 0.5, -2.0, 1.2, 1.2),
        ("ce_gppo", {}, 1.5, 2.0, -2.4, -2.4),
        ("ce_gppo", {"beta1": 0.0}, 0.5, -2.0, 0.0, 0.0),
        ("ce_gppo", {}, 1.5, -2.0, 3.0, 3.0),
        ("ce_gppo", {}, 1.1, 2.0, -2.2, -2.2),
        ("ce_gppo", {}, 5.0, -2.0, 10.0, 10.0),
        ("ce_gppo", {"dual_clip": 3.0}, 5.0, -2.0, 6.0, 0.0),
        ("ce_gppo", {"dual_clip": 3.0}, 5.0, 2.0, -2.4, -2.4),
        ("ce_gppo", {"dual_clip": 3.0}, 0.5, -2.0, 1.2, 1.2),
        # ASPO: 1 / r for a good token, at most 3; without gradient where PPO has none
        ("aspo", {}, 0.5, 2.0, -4.0, -4.0),
        ("aspo", {}, 0.1, 1.0, -3.0, -3.0),
        ("aspo", {}, 1.5, 2.0, 0.0, 0.0),
        ("aspo", {}, 0.5, -2.0, 0.0, 0.0),
        ("aspo", {"dual_clip": 2.0}, 5.0, -2.0, 4.0, 4.0),
        ("aspo", {"dual_clip": None}, 5.0, -2.0, 10.0, 10.0),
        ("aspo", {}, 1.1, 2.0, -2 / 1.1, -2 / 1.1),
        # VESPO: W^2 e^(3 (1 - W)) for a good token, W^3 e^(2 (1 - W)) for a bad one, times log pi = log W
        ("vespo", {}, 2.0, 1.0, -4 * math.exp(-3) * math.log(2), -4 * math.exp(-3)),
        ("vespo", {}, 2.0, -1.0, 8 * math.exp(-2) * math.log(2), 8 * math.exp(-2)),
        ("vespo", {"k_pos": 1.0, "lambda_pos": 0.0}, 2.0, 1.0, -2 * math.log(2), -2.0),
        # DPPO: the token had probability 1, so a fall by more than 0.2, or by -log r of more than 0.05, is masked
        ("dppo_tv", {}, 0.9, -1.0, 0.9, 0.9),
        ("dppo_tv", {}, 0.75, -1.0, 0.0, 0.0),
        ("dppo_tv", {}, 0.75, 1.0, -0.75, -0.75),
        ("dppo_tv", {}, 1.5, -1.0, 1.5, 1.5),  # on its way back, as is the one before
        ("dppo_tv", {"delta": 0.3}, 0.75, -1.0, 0.75, 0.75),
        ("dppo_kl", {}, 0.96, -1.0, 0.96, 0.96),
        ("dppo_kl", {}, 0.94, -1.0, 0.0, 0.0),
        ("dppo_kl", {}, 0.5, 1.0, -0.5, -0.5),
        # KL-Cov: the only token of a step is the one with the greatest covariance, so |log r| is added
        ("kl_cov", {}, 2.0, 3.0, -6 + math.log(2), -5.0),
        ("kl_cov", {"kl_coef": 0.5}, 0.5, -3.0, 1.5 + 0.5 * math.log(2), 1.0),
        # Clip-Cov: its covariance is 0, outside of 1 .. 5
        ("clip_cov", {}, 1.1, 2.0, -2.2, -2.2),
        ("clip_cov", {}, 1.5, 2.0, -2.4, 0.0),
        ("clip_cov", {"low": -1.0}, 1.1, 2.0, 0.0, 0.0),
        # BAPO: of a good token the share is 1, so the bounds are 0.6 and 1.2; of a bad one 0, so they are 0.9 and 3
        ("bapo", {}, 1.5, 2.0, -2.4, 0.0),
        ("bapo", {}, 0.8, -1.0, 0.9, 0.0),
        ("bapo", {}, 2.0, -1.0, 2.0, 2.0),
        ("bapo", {"low_max": 0.6, "high_max": 1.2}, 0.8, -1.0, 0.8, 0.8),
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
    result = policy_loss(name, **options)(x)
    assert result.loss.item() == pytest.approx(loss, abs=1e-12)
    assert gradient(result, x).item() == pytest.approx(slope, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high"),
    [(1.5, 1.0, 0, 1), (1.2, 1.0, 0, 0), (1.5, -1.0, 0, 0), (0.5, 1.0, 0, 0), (0.85, -1.0, 1, 0), (1.5, 0.0, 0, 0)],
)
@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gspo_token", "aspo"])
def test_what_is_logged_as_clipped_is_what_lost_its_gradient(
    name: str, ratio: float, advantage: float, low: int, high: int
) -> None:
    x = one_token(ratio, advantage)
    result = policy_loss(name, eps_low=0.1, eps_high=0.3)(x)
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
    metrics = policy_loss("cispo")(x).metrics
    assert {key: value.item() for key, value in metrics.items()} == {"clip_ratio/high_mean": capped}


def test_dppo_bounds_the_probability_and_not_its_ratio() -> None:
    """The example of the paper's section 4.2: 1e-4 to 1e-2 moves little probability, 0.99 to 0.8 much."""
    rare, common = one_token(100.0, 1.0, old=1e-4), one_token(0.8 / 0.99, -1.0, old=0.99)
    for name, delta in (("dppo_tv", 0.15), ("dppo_kl", 0.05)):
        loss = policy_loss(name, delta=delta)
        assert gradient(loss(rare), rare).item() == pytest.approx(-100)
        assert gradient(loss(common), common).item() == 0
    clipped = policy_loss("ppo_clip")
    assert gradient(clipped(rare), rare).item() == 0
    assert gradient(clipped(common), common).item() == pytest.approx(0.8 / 0.99)


def test_gspo_ratio_is_the_geometric_mean_over_unmasked_tokens() -> None:
    # log-ratios 0.1 and 0.3 count, 5 is masked: s = exp(0.2); the second row has no token
    logp = torch.tensor([[0.1, 5.0, 0.3], [1.0, 1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, False, True], [False] * 3])
    x = LossInputs(logp, torch.zeros_like(logp).detach(), torch.tensor([[2.0], [2.0]], dtype=torch.float64), mask)
    result = policy_loss("gspo", eps_high=1.0)(x)
    assert_close(result.loss[0], torch.full((3,), -2 * math.exp(0.2), dtype=torch.float64), rtol=0, atol=1e-12)
    # two tokens, each with s / 2 of either gradient
    assert gradient(result, x).tolist() == [
        [pytest.approx(-2 * math.exp(0.2)), 0.0, pytest.approx(-2 * math.exp(0.2))],
        [0.0] * 3,
    ]


# Clip-Cov's draws of four tokens are 0.5596, 0.5591, 0.0915 and 0.2100.
# Log-probabilities less their mean of -2.5: 1.5, 0.5, -0.5, -1.5. Advantages less their mean of 0: 2, 2, -1, -3.
COVARIANCES = [3.0, 1.0, 0.5, 4.5]


def four_tokens(log_ratio: float = 0.0) -> LossInputs:
    """Two rows of two tokens."""
    logp = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([[2.0, 2.0], [-1.0, -3.0]], dtype=torch.float64)
    return LossInputs(logp, logp.detach() - log_ratio, advantage, torch.ones(2, 2, dtype=torch.bool))


@pytest.mark.parametrize(
    ("name", "options", "chosen"),
    [
        ("kl_cov", {}, [0, 0, 0, 1]),  # 0.002 of four tokens: at least one
        ("kl_cov", {"fraction": 0.5}, [1, 0, 0, 1]),
        ("kl_cov", {"fraction": 0.8}, [1, 1, 0, 1]),
        ("clip_cov", {}, [1, 0, 0, 0]),  # of 3 and 4.5, which are between 1 and 5, the one that draws more
        ("clip_cov", {"low": 0.4}, [1, 0, 0, 0]),
        ("clip_cov", {"low": 3.5}, [0, 0, 0, 1]),
        ("clip_cov", {"low": 0.4, "fraction": 0.5}, [1, 1, 0, 0]),
        ("clip_cov", {"high": 4.0, "fraction": 0.5}, [1, 0, 0, 0]),
        ("clip_cov", {"low": 5.0, "high": 9.0}, [0, 0, 0, 0]),
    ],
)
def test_tokens_are_chosen_by_the_covariances_of_the_step(
    name: str, options: dict[str, float], chosen: list[float]
) -> None:
    x = four_tokens()
    (metric,) = (v for k, v in policy_loss(name, **options)(x).metrics.items() if k.startswith(name))
    assert metric.flatten().tolist() == chosen
    found = gradient(policy_loss(name, **options)(x), x).flatten()
    left_out = torch.tensor(chosen) == 1 if name == "clip_cov" else torch.zeros(4, dtype=torch.bool)
    assert_close(found, (-x.advantage.flatten()).masked_fill(left_out, 0.0), rtol=0, atol=0)


def test_clip_cov_chooses_no_token_that_is_clipped_anyway() -> None:
    """Ratios of 2 clip the first row: the tokens between 0.4 and 5 are of the second."""
    chosen = policy_loss("clip_cov", low=0.4, fraction=1.0)(four_tokens(math.log(2))).metrics["clip_cov/clipped"]
    assert chosen.tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize(
    ("options", "low", "high"),
    [
        ({"positive": 0.45}, 0.6, 1.2),  # 2 * 2 * 1.2 = 4.8 of the good and 2 + 3.4 of the bad: 4.8 / 10.2 = 0.47
        # 5 / 10.4 = 0.481, 5.2 / 10.6 = 0.491, 5.4 / 10.8 = 0.5
        ({"positive": 0.499}, 0.6, 1.35),
        ({"positive": 0.549}, 0.6, 1.65),  # 6.6 / 12 = 0.55
        ({"positive": 0.55, "delta": 0.3}, 0.6, 1.8),
        ({"positive": 0.55, "high_max": 1.6}, 0.9, 1.6),  # 6.4 / 11.8 = 0.54, and raising the lower bound does not help
        ({"positive": 1.0}, 0.9, 3.0),
        ({"positive": 1.0, "delta": 0.7}, 0.9, 3.0),
    ],
)
def test_bapo_widens_its_bounds_for_the_good_tokens(options: dict[str, float], low: float, high: float) -> None:
    """Good tokens of advantage 2 at ratio 2; bad ones of -1 at ratio 2 and of -3.4 at 1."""
    ratio = torch.tensor([[2.0, 2.0], [2.0, 1.0]], dtype=torch.float64)
    advantage = torch.tensor([[2.0, 2.0], [-1.0, -3.4]], dtype=torch.float64)
    x = LossInputs(ratio.log().requires_grad_(), torch.zeros_like(ratio), advantage, ratio > 0)
    metrics = policy_loss("bapo", **options)(x).metrics
    assert metrics["bapo/low"].unique().tolist() == pytest.approx([low])
    assert metrics["bapo/high"].unique().tolist() == pytest.approx([high])


def test_bapo_refuses_a_step_that_widens_nothing() -> None:
    with pytest.raises(ValueError, match="bapo needs delta > 0 to widen its bounds, got 0"):
        policy_loss("bapo", delta=0.0)(four_tokens())


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
